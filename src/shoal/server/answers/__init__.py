"""From the engine's chunks to answers.

A *choice* (``completion``, ``chat``) turns the chunks of one completion into deltas, in OpenAI's shape for streams. A
stream sends the deltas; a whole answer is the same deltas put together at the end. ``logprobs`` and ``usage`` hold what
both formats share.
"""
