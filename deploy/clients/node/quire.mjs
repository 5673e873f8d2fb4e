// A minimal client of the Quire protocol, version 1 (runtime/protocol/PROTOCOL.md), with many streams per connection.
// Leaving a stream's loop cancels its request. Integers above 2^53 are BigInt; `logit_bias` is a Map with integer keys.
import { readFileSync } from "node:fs";
import net from "node:net";
import tls from "node:tls";
import { Packr } from "msgpackr";

const VERSION = 1, MAX_FRAME_BYTES = 4 << 20, RESUME_FOR_MS = 60_000, MAX_RETRY_MS = 2_000;
const CONNECT_MS = 10_000, NEXT_ADDRESS_MS = 2_000; // time for an answer of the last address, of one before another
const FIRST_BACK_OFF_MS = 1_000, LAST_BACK_OFF_MS = 30_000; // pause in which an address that has failed is tried last
const MAX_FRUITLESS = 5; // servers that accepted a request and were lost before its next token: it may crash them
const FEATURES = ["cache_key", "continue", "embeddings", "heartbeat", "images", "models", "tools"];
const OPTIONS = "messages, chat, deadlineMs, priority, pinMs, promptCacheKey, idempotencyKey, resumable and model";
const CREDIT = 256; // most tokens, or texts, of a request that are in transit or unread
const msgpack = new Packr({ useRecords: false, encodeUndefinedAsNil: true, int64AsType: "auto" });

export class QuireError extends Error {
  constructor(code, message, retryable = false, retryAfterMs = null) {
    Object.assign(super(message), { name: "QuireError", code, retryable, retryAfterMs });
  }
}

export class Client {
  #servers; #options; #nextId; // servers: { address, failures, retryAt }
  #socket = null; #opening = null; // socket after WELCOME; promise until then
  #session = null; #server = null; // session of the last WELCOME, for RESUME; its server
  #features = []; #fingerprint = ""; // granted features; all that decides the bits of outputs
  #leaving = false; #closed = false; // GOAWAY was received; `close` was called
  #inboxes = new Map(); // request id, a BigInt -> inbox

  // With an array of addresses, streams go on at another server when theirs is lost.
  static async connect(addresses, options = {}) {
    const client = new Client();
    client.#servers = [addresses].flat().map((address) => ({ address, failures: 0, retryAt: 0 }));
    [client.#options, client.#nextId] = [options, BigInt(options.firstId ?? 1)];
    await client.#connected();
    return client;
  }

  close() { this.#closed = true; this.#socket?.destroy(); }

  // Chunks { choice, firstIndex, tokenIds, text, logprobs, finishReason, deltas, usage }; the last one has `usage`.
  async *generate(prompt, params = {}, options = {}) {
    const { messages, chat, deadlineMs, priority = 0, pinMs, promptCacheKey, idempotencyKey, resumable = false,
      model, ...unknown } = options;
    for (const name in unknown) throw new TypeError(`generate has no option '${name}'; the options are ${OPTIONS}`);
    const id = this.#nextId++, endsAt = Date.now() + deadlineMs, survives = resumable || this.#servers.length > 1;
    const [texts, images] = takeImages(messages);
    const how = [priority, pinMs, texts, CREDIT, idempotencyKey, resumable, chat && wired(chat)];
    if (this.#leaving && this.#socket) throw unavailable("the server is shutting down; send new requests elsewhere");
    await this.#connected();
    if (images.length && !this.#features.includes("images")) throw new QuireError("INVALID_ARGUMENT", "this server takes no images");
    this.#checkModel(model);
    const fingerprint = this.#fingerprint, outputs = Array.from({ length: params.n ?? 1 }, () => []); // received ids
    const ask = (frame, generated, done = []) => { // adds outputs that another server began, the key, images and the model
      const key = this.#features.includes("cache_key") ? promptCacheKey : undefined;
      if (model) return this.#ask(id, [...frame, generated, done, key ?? "", images, model]);
      if (images.length) return this.#ask(id, [...frame, generated, done, key ?? "", images]);
      return this.#ask(id, short(generated || key ? [...frame, generated, done, key] : frame));
    };
    let inbox = ask(["GENERATE", id, prompt, exact(params), deadlineMs, ...how]);
    let received = 0, credited = 0, session = this.#session; // tokens of all outputs since GENERATE
    let seed = null, fruitless = 0, resuming = false;
    const ended = new Set(), bare = new Set(); // outputs; those that got TOKENS without ids, which may be repeated
    const goOn = (reason) => { // GENERATE for what was not received; `best_of` and beams begin again
      [received, credited, session, resuming] = [0, 0, this.#session, false];
      const frame = ["GENERATE", id, prompt, exact(params), deadlineMs && Math.max(1, endsAt - Date.now()), ...how];
      if (ended.size || outputs.some((ids) => ids.length)) {
        if (seed === null || !this.#features.includes("continue")) throw reason;
        if (this.#fingerprint !== fingerprint) throw unavailable("the next server has another build or model");
        [frame[3], frame[9]] = [exact({ ...params, seed }), null];
        if (!params.best_of && !params.beam_width) return ask(frame, outputs, [...ended]);
      }
      return ask(frame);
    };
    try {
      for (;;) {
        const [type, ...fields] = await inbox.get();
        if (type === "TOKENS") {
          const [, firstIndex, tokenIds, text, logprobs = null, choice = 0, finishReason = null, , deltas = null] = fields;
          fruitless = 0;
          received += tokenIds.length;
          const isRepeated = tokenIds.length ? firstIndex < outputs[choice].length : ended.has(choice) || bare.has(choice);
          if (firstIndex > outputs[choice].length) throw new QuireError("INVALID_ARGUMENT", `TOKENS begins at ${firstIndex}, after ${outputs[choice].length} tokens`);
          if (!tokenIds.length) bare.add(choice);
          if (!isRepeated) {
            outputs[choice].push(...tokenIds);
            if (finishReason) ended.add(choice);
            yield { choice, firstIndex, tokenIds, text, logprobs, finishReason, deltas, usage: null };
          }
          const read = received - credited;
          if (2 * read >= CREDIT && this.#send(["CREDIT", id, read])) credited = received;
        } else if (type === "DONE") {
          let choice = 0; // the output that has not ended
          while (ended.has(choice)) choice++;
          return yield { choice, tokenIds: [], text: "", logprobs: null, finishReason: fields[1], usage: fields[2] };
        } else if (type === "LOST") {
          if (!survives || !fields[0].retryable || fruitless > MAX_FRUITLESS) throw fields[0];
          await this.#connected(Math.min(Date.now() + RESUME_FOR_MS, deadlineMs ? endsAt : Infinity));
          resuming = resumable && this.#session === session;
          if (resuming) [inbox, credited] = [this.#ask(id, ["RESUME", id, received, CREDIT]), received];
          else inbox = goOn(fields[0]);
        } else if (type === "ERROR") {
          const error = new QuireError(...fields.slice(1));
          if (error.code === "UNAVAILABLE" && this.#servers.length > 1 && this.#leaving) { // the server ends now
            this.#socket?.destroy();
            this.#socket = null;
            inbox.put(["LOST", error]);
          } else if (error.code === "NOT_FOUND" && resuming) inbox = goOn(error);
          else throw error;
        } else if (type === "ACCEPTED") [seed, fruitless] = [fields[6] ?? seed, fruitless + !resuming];
      }
    } finally {
      if (this.#inboxes.delete(id)) this.#send(["CANCEL", id]);
    }
  }

  // One Float32Array per input, which is a text or an array of token ids. `onProgress(done, all)` is called as they come.
  embed(inputs, { dimensions, promptName, ...options } = {}) {
    return this.#values("EMBED", [inputs, dimensions, promptName], inputs.length, options);
  }

  // One number per document, as an array: how well it answers the query.
  score(query, documents, options = {}) { return this.#values("SCORE", [query, documents], documents.length, options); }

  #checkModel(model) {
    if (model && !this.#features.includes("models")) throw new QuireError("INVALID_ARGUMENT", "this server serves one model; leave out model");
  }

  async #values(type, what, count, { truncatePromptTokens, deadlineMs, priority = 0, onProgress, model, ...unknown }) {
    for (const name in unknown) throw new TypeError(`${type} has no option '${name}'`);
    await this.#connected();
    if (!this.#features.includes("embeddings")) throw new QuireError("INVALID_ARGUMENT", "this server makes no embeddings");
    this.#checkModel(model);
    const frame = [...what, truncatePromptTokens, deadlineMs, priority, CREDIT, ...(model ? [model] : [])];
    const id = this.#nextId++, inbox = this.#ask(id, [type, id, ...frame]);
    const values = [];
    try {
      for (;;) {
        const [kind, ...fields] = await inbox.get(), before = values.length;
        if (kind === "VECTORS") {
          const [, , size, bytes] = fields, all = new Float32Array(Uint8Array.from(bytes).buffer);
          for (let at = 0; at < all.length; at += size) values.push(all.subarray(at, at + size));
        } else if (kind === "SCORES") values.push(...fields[2]);
        else if (kind === "DONE") return values;
        else if (kind === "LOST") throw fields[0];
        else if (kind === "ERROR") throw new QuireError(...fields.slice(1));
        if (values.length > before && this.#send(["CREDIT", id, values.length - before])) onProgress?.(values.length, count);
      }
    } finally {
      if (this.#inboxes.delete(id)) this.#send(["CANCEL", id]);
    }
  }

  #ask(id, message) {
    const inbox = new Inbox();
    this.#inboxes.set(id, inbox);
    if (!this.#send(message)) this.#answer(id, ["LOST", unavailable("the connection was lost")], true);
    return inbox;
  }

  #send(message, socket = this.#socket) {
    const payload = msgpack.pack(message), length = Buffer.alloc(4);
    length.writeUInt32BE(payload.length);
    return socket?.write(Buffer.concat([length, payload])) !== undefined;
  }

  #answer(id, message, isLast) {
    this.#inboxes.get(BigInt(id))?.put(message);
    if (isLast) this.#inboxes.delete(BigInt(id));
  }

  async #connected(giveUpAt = 0) {
    for (let waitMs = 20; !this.#socket; waitMs = Math.min(2 * waitMs, MAX_RETRY_MS)) {
      if (this.#closed) throw unavailable("this client is closed");
      try {
        await (this.#opening ??= this.#open().finally(() => { this.#opening = null; }));
      } catch (error) {
        if (!error.retryable || Date.now() > giveUpAt) throw error;
        await new Promise((wake) => setTimeout(wake, waitMs * (0.5 + Math.random() / 2)));
      }
    }
  }

  async #open() {
    const now = Date.now(), wait = (server) => Math.max(server.retryAt - now, 0), errors = [];
    const servers = [...this.#servers].sort((one, other) => wait(one) - wait(other));
    for (const server of servers) {
      try {
        await this.#dial(server, server === servers.at(-1) ? CONNECT_MS : NEXT_ADDRESS_MS);
        return Object.assign(server, { failures: 0, retryAt: 0 });
      } catch (error) {
        errors.push(error);
        server.retryAt = now + Math.min(FIRST_BACK_OFF_MS * 2 ** server.failures++, LAST_BACK_OFF_MS);
      }
    }
    throw errors.find((error) => error.retryable) ?? errors[0];
  }

  #dial(server, timeoutMs) {
    return new Promise((resolve, reject) => {
      const { tls: secure, token = null } = this.#options, where = parse(server.address);
      const trust = typeof secure === "string" ? { ca: readFileSync(secure) } : secure === true ? {} : secure;
      const socket = secure ? tls.connect({ ...where, ...trust }) : net.connect(where);
      let buffer = Buffer.alloc(0), reason = unavailable("the server closed the connection");
      socket.setNoDelay(true).on("error", (error) => { reason = NO_TRUST.test(error.code) ? untrusted(error) : unavailable(error.message); });
      socket.setTimeout(timeoutMs).on("timeout", () => socket.destroy(new Error("the server sent nothing, not even PING")));
      socket.on("close", () => {
        if (this.#socket === socket) this.#socket = null;
        for (const id of [...this.#inboxes.keys()]) this.#answer(id, ["LOST", reason], true);
        reject(reason);
      });
      const handle = ([type, ...fields]) => {
        if (type === "WELCOME") {
          [, this.#features, , , this.#session, , this.#fingerprint = ""] = fields;
          [this.#server, this.#leaving, this.#socket] = [server, false, socket];
          resolve(socket.setTimeout(3 * (fields[5] ?? 0)));
        } else if (type === "ERROR" && fields[0] === null) reason = new QuireError(...fields.slice(1));
        else if (type === "PING") this.#send(["PONG", fields[0] ?? 0], socket);
        else if (type === "GOAWAY") this.#leaving = true;
        else this.#answer(fields[0], [type, ...fields], !["ACCEPTED", "PROGRESS", "TOKENS", "VECTORS", "SCORES"].includes(type));
      };
      socket.on("data", (data) => {
        buffer = Buffer.concat([buffer, data]);
        while (buffer.length >= 4 && buffer.length >= 4 + buffer.readUInt32BE()) {
          const end = 4 + buffer.readUInt32BE();
          handle(msgpack.unpack(buffer.subarray(4, end)));
          buffer = buffer.subarray(end);
        }
      });
      this.#send(short(["HELLO", [VERSION], token, FEATURES, MAX_FRAME_BYTES, server === this.#server ? this.#session : null]), socket);
    });
  }
}

class Inbox {
  #items = []; #wake = () => {};
  put = (item) => this.#wake(this.#items.push(item));
  get = async () => (this.#items.length || await new Promise((wake) => { this.#wake = wake; }), this.#items.shift());
}

// Codes of TLS errors that a retry does not change: an untrusted, expired or foreign certificate, a server without TLS.
const NO_TRUST = /^(ERR_(TLS|SSL)_|EPROTO$|CERT_|UNABLE_TO_|DEPTH_ZERO_|SELF_SIGNED_|HOSTNAME_MISMATCH$|INVALID_CA$)/;
const untrusted = (error) => new QuireError("FAILED_PRECONDITION", `TLS failed: ${error.message}; is \`tls\` the server's CA file?`);
const unavailable = (message) => new QuireError("UNAVAILABLE", message, true);
// msgpackr writes numbers beyond 32 bits as floats; as BigInt they stay integers.
const exact = (params) => Object.fromEntries(Object.entries(params).map(([name, value]) =>
  [name, Number.isSafeInteger(value) && Math.abs(value) > 0x7fffffff ? BigInt(value) : value]));

// Tools travel as JSON text: frames nest a few levels only.
const wired = ({ tools = [], ...chat }) => ({ ...chat, tools: tools.map((tool) => JSON.stringify(tool)) });

// The messages with bare image parts, and the bytes of { type: "image", image } parts in order.
function takeImages(messages) {
  const images = [], isImage = (part) => part?.type === "image" && images.push(Buffer.from(part.image));
  const bare = (content) => Array.isArray(content) ? content.map((part) => isImage(part) ? { type: "image" } : part) : content;
  return [messages?.map((message) => ({ ...message, content: bare(message.content) })), images];
}

// Trailing fields with defaults are left out: an older server may not know them.
function short(frame) {
  while ([undefined, null, false].includes(frame.at(-1))) frame.pop();
  return frame;
}

function parse(address) {
  const [, path, host, port] = address.match(/^(?:unix:(.+)|\[?(.+?)\]?:(\d+))$/) ?? [];
  return path ? { path } : { host, port };
}
