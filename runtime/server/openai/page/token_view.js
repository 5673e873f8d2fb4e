// Draws the tokens of an answer with their probabilities.

import { element, percent } from "./elements.js";

// A token's class by its probability: the first whose limit it reaches.
const LEVELS = [[0.9, "p90"], [0.5, "p50"], [0.2, "p20"], [0.05, "p5"], [0.01, "p1"], [0, "p0"]];

export class TokenView {
  #spans = [];
  #tokens = [];
  #selected = -1;
  #line = element("div", { className: "answer tokens", tabIndex: 0 });
  #detail = element("div", { className: "detail" }, "Select a token with the pointer, or with the arrow keys.");

  constructor() {
    this.#line.setAttribute("aria-label", "Tokens; arrow keys select one");
    this.#line.onclick = ({ target }) => {
      const index = this.#spans.indexOf(target.closest(".token"));
      if (index >= 0) this.#select(index);
    };
    this.#line.onkeydown = (event) => this.#move(event);
    this.element = element("div", {}, this.#line, legendOfLevels(), this.#detail);
  }

  // Show these tokens, which begin with those of the last call.
  update(tokens) {
    const added = tokens.slice(this.#spans.length).map((token) =>
      element("span", { className: `token ${level(token.logprob)}` }, visible(token)));
    this.#line.append(...added);
    this.#spans.push(...added);
    this.#tokens = tokens;
  }

  #move(event) {
    const moves = { ArrowRight: this.#selected + 1, ArrowLeft: this.#selected - 1, Home: 0, End: this.#spans.length - 1 };
    const moved = moves[event.key];
    if (moved === undefined || event.altKey) return;
    event.preventDefault();
    this.#select(moved);
  }

  #select(index) {
    this.#spans[this.#selected]?.classList.remove("selected");
    this.#selected = Math.max(0, Math.min(index, this.#spans.length - 1));
    this.#spans[this.#selected].classList.add("selected");
    this.#detail.replaceChildren(...alternatives(this.#tokens[this.#selected]));
  }
}

const level = (logprob) => LEVELS.find(([limit]) => Math.exp(logprob) >= limit)[1];

// Return what shows a token: its line breaks get a sign, and bytes that are no whole character are in hexadecimal.
function visible({ text, bytes }) {
  if (text.includes("\ufffd") && bytes) return bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
  return text === "" ? "∅" : text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
}

function alternatives({ text, bytes, logprob, top }) {
  const others = top.filter((other) => other.text !== text);
  const all = [{ text, bytes, logprob }, ...others].sort((a, b) => b.logprob - a.logprob);
  return all.map((each) => {
    const bar = element("i", { className: level(each.logprob) });
    bar.style.width = `${100 * Math.exp(each.logprob)}%`;
    const shown = JSON.stringify(each.text);
    return element("div", { className: each.text === text ? "chosen" : "" },
      element("code", {}, shown), element("span", { className: "bar" }, bar), element("small", {}, percent(Math.exp(each.logprob))));
  });
}

function legendOfLevels() {
  const entries = LEVELS.map(([limit, name]) =>
    element("li", {}, element("i", { className: `token ${name}` }), limit ? `≥ ${100 * limit} %` : "less"));
  return element("ul", { className: "legend" }, ...entries);
}
