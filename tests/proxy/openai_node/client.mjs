// Takes the turns of one conversation with OpenAI's own client for Node, by turns whole and streamed.
// Usage: node client.mjs BASE_URL MODEL < turns.json   (a list of lists of messages, one for each turn)
// Prints a JSON line a turn: the answer, and the outcome from the header.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "node", maxRetries: 0 });
const tools = [{ type: "function", function: { name: "cat", parameters: { type: "object", properties: {} } } }];
const messages = [];

for (const [turn, added] of JSON.parse(readFileSync(0)).entries()) {
  messages.push(...added);
  const request = { model, messages, tools, temperature: 0, max_tokens: 6, stream: turn % 2 === 1 };
  if (request.stream) request.stream_options = { include_usage: true };
  const { data, response } = await client.chat.completions.create(request).withResponse();
  let content = "";
  let usage = null;
  if (request.stream) {
    for await (const chunk of data) {
      content += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
  } else {
    content = data.choices[0].message.content ?? "";
    usage = data.usage;
  }
  messages.push({ role: "assistant", content });
  console.log(JSON.stringify({ content, usage, outcome: JSON.parse(response.headers.get("x-leyline")) }));
}

const models = await client.models.list();
console.log(JSON.stringify({ models: models.data.map((one) => one.id) }));
