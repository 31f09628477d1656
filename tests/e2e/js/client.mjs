// What the official JavaScript client makes of the server's answers, as one JSON object for the Python test.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Name three rivers." }];
const how = { model: process.argv[3], messages, temperature: 0, max_tokens: 24 };
const weather = {
  type: "function",
  function: {
    name: "weather",
    parameters: {
      type: "object",
      properties: { city: { type: "string", maxLength: 12 } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

async function joined(stream) {
  let text = "";
  let usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? chunk.choices[0]?.text ?? "";
    usage = chunk.usage ?? usage;
  }
  return { text, usage };
}

async function failure(promise) {
  try {
    await promise;
    return null;
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, param: error.param, code: error.code };
  }
}

const once = { parallel_tool_calls: false, max_tokens: 100 };
const { data: chat, request_id } = await client.chat.completions.create(how).withResponse();
const stream = { stream: true, stream_options: { include_usage: true } };
const runner = client.chat.completions.stream({ ...how, tools: [weather], tool_choice: "required", ...once });
const called = await runner.finalChatCompletion();
const prompt = { model: process.argv[3], prompt: "The capital of France is", temperature: 0, max_tokens: 8 };

console.log(
  JSON.stringify({
    request_id,
    chat: { text: chat.choices[0].message.content, finish: chat.choices[0].finish_reason, usage: chat.usage },
    chat_stream: await joined(await client.chat.completions.create({ ...how, ...stream })),
    completion: (await client.completions.create(prompt)).choices[0].text,
    completion_stream: await joined(await client.completions.create({ ...prompt, ...stream })),
    models: (await client.models.list()).data.map((model) => model.id),
    model: (await client.models.retrieve(process.argv[3])).id,
    call: called.choices[0].message.tool_calls[0].function,
    call_finish: called.choices[0].finish_reason,
    bad_field: await failure(client.chat.completions.create({ ...how, temperature: -1 })),
    bad_model: await failure(client.chat.completions.create({ ...how, model: "other" })),
    bad_stream: await failure(client.chat.completions.create({ ...how, stream: true, messages: [] })),
  }),
);
