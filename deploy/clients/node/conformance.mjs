// Driver of the Node client for tests/conformance/run.py, which describes the commands and answers.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { Client, QuireError } from "./quire.mjs";

let client;
let streams = new Map();

const commands = {
  async connect({ address, token, ca, first_id: firstId }) {
    client?.close();
    streams = new Map();
    const tls = ca && { ca: readFileSync(ca) };
    client = await Client.connect(address, { token, tls, firstId: firstId && BigInt(firstId) });
  },
  async start({ stream, request }) {
    streams.set(stream, begin(request));
  },
  read: ({ stream, tokens }) => read(streams.get(stream), tokens),
  finish: ({ stream }) => read(streams.get(stream), Infinity),
  leave: ({ stream }) => streams.get(stream).chunks.return(),
  embed: async ({ inputs }) => (await client.embed(inputs)).map((vector) => [...vector]),
  score: ({ query, documents }) => client.score(query, documents),
  run: ({ requests }) => Promise.all(requests.map((request) => read(begin(request), Infinity))),
};

function begin({ prompt, messages, chat, params, resumable, idempotency_key: idempotencyKey, deadline_ms: deadlineMs }) {
  for (const part of (messages ?? []).flatMap((message) => message.content)) {
    if (part.image) part.image = Buffer.from(part.image, "base64");
  }
  const chunks = client.generate(prompt, known(params), { messages, chat, resumable, idempotencyKey, deadlineMs });
  return { chunks, tokens: 0, outcome: { choices: [], usage: null } };
}

function known({ seed, logit_bias: bias, ...params }) {
  if (seed !== undefined) params.seed = BigInt(seed);
  if (bias) params.logit_bias = new Map(Object.entries(bias).map(([token, value]) => [Number(token), value]));
  return params;
}

async function read(stream, tokens) {
  while (stream.tokens < tokens) {
    const { value: chunk, done } = await stream.chunks.next();
    if (done) break;
    stream.tokens += chunk.tokenIds.length;
    const choice = (stream.outcome.choices[chunk.choice] ??= { token_ids: [], text: "", logprobs: null, finish_reason: null });
    choice.token_ids.push(...chunk.tokenIds);
    choice.text += chunk.text;
    if (chunk.logprobs) (choice.logprobs ??= []).push(...chunk.logprobs);
    if (chunk.deltas) (choice.deltas ??= []).push(...chunk.deltas);
    choice.finish_reason = chunk.finishReason;
    stream.outcome.usage = chunk.usage && { ...chunk.usage, seed: String(chunk.usage.seed) };
  }
  return stream.outcome;
}

for await (const line of createInterface({ input: process.stdin })) {
  const { do: name, ...rest } = JSON.parse(line);
  let answer;
  try {
    answer = { ok: (await commands[name](rest)) ?? null };
  } catch (error) {
    if (!(error instanceof QuireError)) throw error;
    answer = { error: { code: error.code, retryable: error.retryable, message: error.message } };
  }
  console.log(JSON.stringify(answer));
}
process.exit(0);
