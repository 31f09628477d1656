"""Tool calls, as text: definitions in, prompts and grammars out, and generated text back into calls.

``definitions`` checks what a caller sends, ``formats`` knows how models write calls, ``prompting`` shows tools and past
calls to a model, ``enforcing`` makes the grammar of an obligatory call, ``parser`` finds calls in a stream of text, and
``use`` is all of it for one request. Nothing here knows the engine or HTTP.
"""
