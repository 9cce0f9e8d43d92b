// One scenario of the npm client `openai` against a server, the result as JSON on standard output.
// node openai_client.mjs BASE_URL MODEL SCENARIO

import OpenAI from "openai";

const [baseURL, model, scenario] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "What turns a water wheel?" }];
const greedy = { model, messages, temperature: 0, max_tokens: 24 };

async function failure(promise) {
  try {
    return { answer: await promise };
  } catch (error) {
    const { status, code, param, type, message } = error;
    return { name: error.constructor.name, status, code, param, type, message };
  }
}

const scenarios = {
  async whole() {
    const { choices, usage, object } = await client.chat.completions.create(greedy);
    return { object, usage, text: choices[0].message.content, role: choices[0].message.role, finish: choices[0].finish_reason };
  },

  async streamed() {
    const result = { text: "", roles: [], finishes: [], deltas: 0, usages: [] };
    const stream = await client.chat.completions.create({ ...greedy, stream: true, stream_options: { include_usage: true } });
    for await (const chunk of stream) {
      if (chunk.usage) result.usages.push(chunk.usage);
      for (const { delta, finish_reason } of chunk.choices) {
        if (delta.role) result.roles.push(delta.role);
        if (delta.content) result.deltas += 1;
        result.text += delta.content ?? "";
        if (finish_reason) result.finishes.push(finish_reason);
      }
    }
    return result;
  },

  async helper() {
    // The SDK's own accumulator: fails on a chunk it cannot place.
    const runner = client.chat.completions.stream(greedy);
    const events = [];
    runner.on("content", (delta) => events.push(delta));
    const final = await runner.finalChatCompletion();
    return { text: final.choices[0].message.content, joined: events.join("") };
  },

  async completion() {
    const body = { model, prompt: "The wheel turns because", temperature: 0, max_tokens: 8 };
    const whole = await client.completions.create(body);
    let text = "";
    for await (const chunk of await client.completions.create({ ...body, stream: true })) {
      text += chunk.choices[0]?.text ?? "";
    }
    return { whole: whole.choices[0].text, streamed: text };
  },

  async models() {
    const ids = [];
    for await (const entry of client.models.list()) ids.push(entry.id);
    return { ids, one: (await client.models.retrieve(model)).id };
  },

  async leaving() {
    // Break out of a long stream, then see that the next request is served.
    const stream = await client.chat.completions.create({ ...greedy, max_tokens: 1000, stream: true });
    let chunks = 0;
    for await (const _ of stream) if (++chunks === 5) break;
    const { choices } = await client.chat.completions.create(greedy);
    return { chunks, text: choices[0].message.content };
  },

  unknownModel: () => failure(client.chat.completions.create({ ...greedy, model: "gpt-5" })),
  tooLong: () => failure(client.chat.completions.create({ ...greedy, max_tokens: 1000000 })),
  badTemperature: () => failure(client.chat.completions.create({ ...greedy, temperature: -1, stream: true })),
  prediction: () => failure(client.chat.completions.create({ ...greedy, prediction: { type: "content", content: "x" } })),
};

console.log(JSON.stringify(await scenarios[scenario]()));
