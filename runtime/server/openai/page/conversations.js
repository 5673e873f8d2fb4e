// Conversations: their settings, turns and answers, and the requests that they make. Must not touch the document.

import { ApiError, stream } from "./api.js";

const STORED = "quire.conversations"; // key in the tab's storage
const TEXT_MAX_TOKENS = 200; // limit in mode `text`, where the server's default is 16
const TOP_LOGPROBS = 4;
const MAX_SEED = 2 ** 32;

const lines = (text) => text.split("\n").filter((line) => line);

function parsed(text, label) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new ApiError(`${label}: ${error.message}`);
  }
}

// What can be set. `kind` is number, text (several lines), check, or a list of choices. `fields` returns the fields
// of the request, from a value that is not empty.
export const SETTINGS = [
  { name: "mode", label: "Mode", kind: ["chat", "text"], note: "text continues what you write, without a chat template", fields: () => ({}) },
  { name: "system", label: "System message", kind: "text", fields: () => ({}) },
  { name: "max_tokens", label: "Maximum tokens", kind: "number", step: 1, min: 1 },
  { name: "temperature", label: "Temperature", kind: "number", step: 0.1, min: 0, note: "0: always the most likely token" },
  { name: "top_p", label: "Top p", kind: "number", step: 0.05, min: 0 },
  { name: "top_k", label: "Top k", kind: "number", step: 1, min: 0 },
  { name: "min_p", label: "Min p", kind: "number", step: 0.01, min: 0 },
  { name: "repetition_penalty", label: "Repetition penalty", kind: "number", step: 0.05, min: 0 },
  { name: "presence_penalty", label: "Presence penalty", kind: "number", step: 0.1, min: -2 },
  { name: "frequency_penalty", label: "Frequency penalty", kind: "number", step: 0.1, min: -2 },
  { name: "seed", label: "Seed", kind: "number", step: 1, note: "empty: another one for each answer" },
  { name: "stop", label: "Stop texts, one per line", kind: "text", fields: (text) => ({ stop: lines(text) }) },
  { name: "tools", label: "Tools, a JSON list", kind: "text", note: "in OpenAI's form; you write their results", fields: () => ({}) },
  { name: "format", label: "Format", kind: ["any text", "JSON object"], fields: (format) => (format === "JSON object" ? { response_format: { type: "json_object" } } : {}) },
  { name: "logprobs", label: "Ask for probabilities of tokens", kind: "check", fields: () => ({}) },
];

export const DEFAULTS = Object.fromEntries(SETTINGS.map(({ name, kind }) => [name, Array.isArray(kind) ? kind[0] : kind === "check" ? true : ""]));

const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"];
const samplingOf = (body) => Object.fromEntries(SAMPLING.filter((name) => name in body).map((name) => [name, body[name]]));

// One answer as it grows.
export class Answer {
  text = "";
  reasoning = "";
  calls = []; // calls of tools: {id, name, arguments}
  tokens = []; // {text, bytes, logprob, top: [{text, logprob}]}, if the request asks for probabilities
  pieces = 0; // events with text
  state = "waiting"; // "waiting", then "streaming"; at the end "done", "stopped" or "failed"
  problem = ""; // problem of a failed answer
  finishReason = null;
  usage = null;
  seed = null;
  sampling = {}; // the parameters that decide how its tokens are drawn, besides the seed
  isMarkdown = true; // false: a text or JSON
  startedMs = 0;
  firstMs = null; // time of the first text
  endedMs = null;
  version = 0; // grows with each change

  get isLive() {
    return this.state === "waiting" || this.state === "streaming";
  }

  get numTokens() { // exact once the usage is there, and with probabilities
    return this.usage?.completion_tokens ?? (this.tokens.length || this.pieces);
  }

  // Tokens per second after the first one, null where that means nothing.
  get rate() {
    if (this.firstMs === null || this.numTokens < 2) return null;
    const ms = this.usage?.timings.decode_ms || (this.endedMs ?? performance.now()) - this.firstMs;
    return ms > 0 ? (1000 * (this.numTokens - 1)) / ms : null;
  }

  take({ choices, usage }) {
    this.version += 1;
    this.usage = usage ?? this.usage;
    for (const choice of choices) {
      const text = choice.text ?? choice.delta.content ?? "";
      const reasoning = choice.delta?.reasoning_content ?? "";
      this.text += text;
      this.reasoning += reasoning;
      for (const piece of choice.delta?.tool_calls ?? []) this.#takeCall(piece);
      this.tokens.push(...tokensOf(choice.logprobs));
      this.finishReason = choice.finish_reason ?? this.finishReason;
      if (text || reasoning) {
        this.pieces += 1;
        this.firstMs ??= performance.now();
        this.state = "streaming";
      }
    }
  }

  #takeCall({ index, id = "", function: { name = "", arguments: given = "" } }) {
    const call = (this.calls[index] ??= { id: "", name: "", arguments: "" });
    call.id += id;
    call.name += name;
    call.arguments += given;
    this.firstMs ??= performance.now();
    this.state = "streaming";
  }

  end(state, problem = "") {
    this.version += 1;
    this.state = state;
    this.problem = problem;
    this.endedMs = performance.now();
  }
}

// Return the tokens of a chat's or a completion's logprobs in one form.
function tokensOf(logprobs) {
  if (logprobs?.content) {
    return logprobs.content.map(({ token, bytes, logprob, top_logprobs: top }) =>
      ({ text: token, bytes, logprob, top: top.map((other) => ({ text: other.token, logprob: other.logprob })) }));
  }
  return (logprobs?.tokens ?? []).map((text, index) => ({
    text,
    bytes: null,
    logprob: logprobs.token_logprobs[index],
    top: Object.entries(logprobs.top_logprobs[index]).map(([other, logprob]) => ({ text: other, logprob })),
  }));
}

export class Conversation {
  draft = ""; // the text of the composer
  images = []; // images of the composer: {name, url}, with a data URL; "" if the tab's storage could not keep it
  turns = []; // {question, images, results, answer}; results of the last answer's calls instead of a question: {id, name, content}
  #abort = null; // stops the live answer

  constructor(settings = DEFAULTS, turns = []) {
    this.settings = { ...settings };
    this.turns = turns;
  }

  get title() {
    const { question, images } = this.turns[0] ?? { question: this.draft, images: this.images };
    const first = question.trim() || (images[0]?.name ?? "");
    return first.split("\n")[0].slice(0, 80) || "New conversation";
  }

  get live() { // the answer that is being generated
    const answer = this.turns.at(-1)?.answer;
    return answer?.isLive ? answer : null;
  }

  // Ask the served model, and return when the answer has ended, however it did. `changed` is called after every change.
  async ask({ question, images, results = [] }, served, changed) {
    const answer = new Answer();
    this.turns.push({ question, images, results, answer });
    answer.seed = this.settings.seed === "" ? Math.floor(Math.random() * MAX_SEED) : Number(this.settings.seed);
    answer.startedMs = performance.now();
    this.#abort = new AbortController();
    changed();
    try {
      const { path, body } = this.#request(served, answer.seed);
      answer.sampling = samplingOf({ ...served.defaultSampling, ...body });
      answer.isMarkdown = this.settings.mode === "chat" && !body.response_format;
      for await (const event of stream(path, body, this.#abort.signal)) {
        answer.take(event);
        changed();
      }
      answer.end("done");
    } catch (error) {
      if (error.name === "AbortError") {
        answer.end("stopped");
      } else {
        const seconds = error.retryMs && Math.ceil(error.retryMs / 1000);
        answer.end("failed", error.message + (seconds ? `; try again in ${seconds} s` : ""));
        if (!(error instanceof ApiError) || error.status === 401) throw error;
      }
    } finally {
      changed();
    }
  }

  stop() {
    if (this.live) this.#abort.abort();
  }

  // Remove the last turn, which is not live, and return it.
  takeBack() {
    return this.turns.pop();
  }

  // Return path and body of the request for the last turn's answer.
  #request({ name: model, pageSampling }, seed) {
    const isChat = this.settings.mode === "chat";
    const body = { model, stream: true, stream_options: { include_usage: true }, return_timings: true, ...pageSampling };
    for (const { name, kind, fields } of SETTINGS) {
      const value = this.settings[name];
      if (value !== "") Object.assign(body, fields ? fields(value) : { [name]: kind === "number" ? Number(value) : value });
    }
    body.seed = seed;
    if (isChat) {
      body.messages = this.#messages();
      if (this.settings.tools.trim()) body.tools = parsed(this.settings.tools, "Tools");
      if (this.settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: TOP_LOGPROBS });
      return { path: "v1/chat/completions", body };
    }
    body.prompt = this.turns.map(({ question, answer }) => question + answer.text).join("");
    body.max_tokens ??= TEXT_MAX_TOKENS;
    if (this.settings.logprobs) body.logprobs = TOP_LOGPROBS;
    return { path: "v1/completions", body };
  }

  #messages() {
    const messages = [];
    let results = []; // results of the following turn, without which calls are left out
    for (const turn of this.turns.toReversed()) {
      const { text, calls, isLive } = turn.answer;
      const answered = results.length ? calls : [];
      if (!(text || answered.length || isLive)) continue; // turns without an answer are left out, except the last
      if (text || answered.length) messages.unshift(answerMessage(text, answered));
      messages.unshift(...askingMessages(turn));
      ({ results } = turn);
    }
    if (this.settings.system) messages.unshift({ role: "system", content: this.settings.system });
    return messages;
  }
}

function answerMessage(content, calls) {
  const message = { role: "assistant", content };
  if (calls.length) message.tool_calls = calls.map(({ id, ...called }) => ({ id, type: "function", function: called }));
  return message;
}

function askingMessages({ question, images, results }) {
  if (!results.length) return [{ role: "user", content: contentOf(question, images) }];
  return results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content }));
}

// Return the content of a message: text, or parts with the images first.
function contentOf(question, images) {
  const parts = images.filter(({ url }) => url).map(({ url }) => ({ type: "image_url", image_url: { url } }));
  if (!parts.length) return question;
  return question.trim() ? [...parts, { type: "text", text: question }] : parts;
}

// The conversations of this tab, without the probabilities of tokens

export function save(conversations) {
  if (!isStored(conversations, (images) => images)) isStored(conversations, namesOnly);
}

const namesOnly = (images) => images.map(({ name }) => ({ name, url: "" }));

// Store the conversations with what `kept` keeps of images. Return false if the tab's storage is too small: what was
// saved before stays.
function isStored(conversations, kept) {
  const stored = conversations.map(({ settings, turns }) => ({
    settings,
    turns: turns.map(({ images, answer, ...asked }) => ({ ...asked, images: kept(images), answer: { ...answer, tokens: [] } })),
  }));
  try {
    sessionStorage.setItem(STORED, JSON.stringify(stored));
    return true;
  } catch {
    return false;
  }
}

export function load() {
  const kept = JSON.parse(sessionStorage.getItem(STORED) ?? "[]");
  return kept.map(({ settings, turns }) => new Conversation({ ...DEFAULTS, ...settings }, turns.map(restoredTurn)));
}

function restoredTurn({ question, images, results = [], answer }) {
  const restored = Object.assign(new Answer(), answer);
  if (restored.isLive) Object.assign(restored, { state: "stopped", endedMs: restored.firstMs }); // the page was left
  return { question, images, results, answer: restored };
}
