// The search over texts of an embedding model: vectors, their ranking, and how they are shown. A model that scores pairs of
// texts ranks them itself; one with labels labels each text.

import { post } from "./api.js";
import { element, percent, whole } from "./elements.js";

const STORED = "quire.search"; // key in the tab's storage
const BATCH = 64; // texts of one request: the server takes that many at a time, and the page shows how far it is
const MAX_SHOWN = 100;
const TRUNCATED = { truncate_prompt_tokens: -1 }; // the model gets as much of a long text as it takes
const QUERY_PROMPTS = ["query", "search_query", "web_search_query"], TEXT_PROMPTS = ["document", "passage", "search_document"];
const EXAMPLE = {
  query: "Which animal sleeps in winter?",
  texts: [
    "Hedgehogs hibernate under leaves until spring.",
    "The first steam engines pumped water out of mines.",
    "A violin has four strings.",
    "Bears rest in their dens during the cold months.",
    "The page cache keeps the blocks of files in memory.",
    "Swallows fly to Africa before the frost.",
  ],
};

const $ = (id) => document.getElementById(id);
const linesOf = (text) => text.split("\n").map((line) => line.trim()).filter((line) => line);

export class Search {
  #model;
  #vectors = new Map(); // text -> its vector; texts are not asked for twice
  #abort = null;
  #onUnauthenticated;

  constructor(model, onUnauthenticated) {
    this.#model = model;
    this.#onUnauthenticated = onUnauthenticated;
    const ranks = model.can("rerank");
    $("query-row").hidden = !ranks;
    $("search-title").textContent = ranks ? "Rank texts by a query" : "Label texts";
    $("run").textContent = ranks ? "Search" : "Label";
    const { query = "", texts = "" } = JSON.parse(sessionStorage.getItem(STORED) ?? "{}");
    $("query").value = query;
    $("texts").value = texts;
    $("search-form").onsubmit = (event) => {
      event.preventDefault();
      this.#run();
    };
    $("query").onkeydown = (event) => {
      if (event.key === "Escape") this.#abort?.abort();
    };
    $("texts").oninput = () => this.#count();
    $("example").onclick = () => {
      $("query").value = EXAMPLE.query;
      $("texts").value = EXAMPLE.texts.join("\n");
      this.#count();
      this.#run();
    };
    this.#count();
  }

  #count() {
    const count = new Set(linesOf($("texts").value)).size;
    $("num-texts").textContent = count === 1 ? "1 text" : `${whole.format(count)} texts`;
  }

  async #run() {
    const texts = [...new Set(linesOf($("texts").value))];
    const query = $("query").value.trim();
    save(query, $("texts").value);
    if (!texts.length || (this.#model.can("rerank") && !query)) {
      $("search-problem").textContent = texts.length ? "Write a query." : "Write some texts, one per line.";
      return;
    }
    this.#abort?.abort();
    const abort = (this.#abort = new AbortController());
    $("search-problem").textContent = "";
    $("found-status").textContent = "working…";
    const startedMs = performance.now();
    try {
      const found = await this.#find(query, texts, abort.signal);
      const ms = (performance.now() - startedMs).toFixed(0);
      $("found-status").textContent = `${whole.format(texts.length)} texts in ${ms} ms${found.length > MAX_SHOWN ? `; the first ${MAX_SHOWN}` : ""}`;
      $("found").replaceChildren(...found.slice(0, MAX_SHOWN).map(foundItem));
    } catch (error) {
      if (abort === this.#abort) $("found-status").textContent = "";
      if (error.name === "AbortError") return;
      $("search-problem").textContent = error.message;
      if (error.status === 401) this.#onUnauthenticated(error.message);
    }
  }

  // Return the texts as {text, score, label}, the best first.
  async #find(query, texts, signal) {
    const { name: model, can } = this.#model;
    if (can("embedding")) return this.#byCosine(query, texts, signal);
    if (can("rerank")) {
      const { results } = await post("v1/rerank", { model, query, documents: texts, return_documents: false, ...TRUNCATED }, signal);
      return results.map(({ index, relevance_score: score }) => ({ text: texts[index], score, shown: score.toFixed(3) }));
    }
    const { data } = await post("classify", { model, input: texts, ...TRUNCATED }, signal);
    return data.map(({ index, label, probs }) => {
      const score = Math.max(...probs);
      return { text: texts[index], score, shown: `${label} ${percent(score)}` };
    });
  }

  async #byCosine(query, texts, signal) {
    const [wanted] = await this.#embedded([query], QUERY_PROMPTS, signal);
    const missing = texts.filter((text) => !this.#vectors.has(text));
    for (let first = 0; first < missing.length; first += BATCH) {
      const batch = missing.slice(first, first + BATCH);
      const vectors = await this.#embedded(batch, TEXT_PROMPTS, signal);
      batch.forEach((text, index) => this.#vectors.set(text, vectors[index]));
      $("found-status").textContent = `${whole.format(first + batch.length)} of ${whole.format(missing.length)} texts`;
    }
    const scored = texts.map((text) => ({ text, score: cosine(wanted, this.#vectors.get(text)) }));
    return scored.sort((a, b) => b.score - a.score).map((each) => ({ ...each, shown: each.score.toFixed(3) }));
  }

  // Return the vectors of texts. The first of `prompts` that the model has goes before each text.
  async #embedded(input, prompts, signal) {
    const { name: model, prompts: known } = this.#model;
    const prompt = prompts.find((each) => known.includes(each));
    const body = { model, input, encoding_format: "base64", ...TRUNCATED, ...(prompt ? { prompt_name: prompt } : {}) };
    const { data } = await post("v1/embeddings", body, signal);
    return data.map(({ embedding }) => vectorOf(embedding));
  }
}

function vectorOf(base64) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Float32Array.from({ length: bytes.length / 4 }, (_, index) => view.getFloat32(4 * index, true));
}

export function cosine(a, b) {
  let product = 0, squaresOfA = 0, squaresOfB = 0;
  for (let index = 0; index < a.length; index += 1) {
    product += a[index] * b[index];
    squaresOfA += a[index] * a[index];
    squaresOfB += b[index] * b[index];
  }
  return product / Math.sqrt(squaresOfA * squaresOfB) || 0; // 0 for a vector of zeros
}

function foundItem({ text, score, shown }) {
  const bar = element("i");
  bar.style.width = `${100 * Math.max(0, Math.min(1, score))}%`;
  return element("li", {}, element("span", { className: "score" }, element("b", {}, shown), element("span", { className: "bar" }, bar)), element("p", {}, text));
}

function save(query, texts) {
  try {
    sessionStorage.setItem(STORED, JSON.stringify({ query, texts }));
  } catch {
    sessionStorage.removeItem(STORED); // the texts are longer than the tab's storage
  }
}
