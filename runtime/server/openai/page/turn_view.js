// Draws a turn of a conversation: the question, the answer as it grows, and where its time went.

import { copyButton, duration, element, rateOf, showChildren, whole } from "./elements.js";
import { MarkdownView } from "./markdown_view.js";
import { TokenView } from "./token_view.js";

const PHASES = ["queue", "prefill", "decode", "stall"];

export class TurnView {
  #turn;
  #asked;
  #reasoning = element("details", { className: "reasoning", open: true }, element("summary", {}, "Reasoning"), "");
  #text = null; // draws the answer as text or Markdown
  #tokens = null; // draws its tokens
  #calls = []; // one section for each call
  #callForm = null; // the results of the calls, as they are written
  #facts = element("span", { className: "facts" });
  #foot = element("footer");
  #buttons;
  #copy;
  #giveResults;

  constructor(turn, { retry, edit, giveResults }) {
    this.#turn = turn;
    this.#giveResults = giveResults;
    const { question, images, results, answer } = turn;
    this.element = element("article");
    this.#asked = element("div", { className: "question" }, question);
    if (images.length) this.#asked.prepend(element("ul", { className: "pictures" }, ...images.map((image) => picture(image))));
    for (const { name, content } of results) this.#asked.append(element("div", {}, element("b", {}, `${name}: `), content));
    this.#copy = copyButton(() => answer.text, "Copy the answer as the model wrote it");
    this.#buttons = [
      element("button", { type: "button", className: "retry", title: "Ask again (Alt R)", onclick: retry }, "Retry"),
      element("button", { type: "button", className: "edit", title: "Change the message (Alt E)", onclick: edit }, "Edit"),
    ];
  }

  update({ showsTokens, isLast }) {
    const { answer } = this.#turn;
    this.element.className = answer.state;
    const shown = [this.#asked];
    if (answer.reasoning) shown.push(this.#updateReasoning(answer));
    shown.push(showsTokens && answer.tokens.length ? this.#updateTokens(answer) : this.#updateText(answer));
    if (showsTokens && !answer.tokens.length && answer.text) {
      shown.push(element("p", { className: "note" }, "No probabilities: they were not asked for, or the page was loaded again."));
    }
    if (answer.calls.length) shown.push(...this.#updateCalls(answer, isLast));
    if (answer.problem) shown.push(element("p", { className: "problem", role: "alert" }, answer.problem));
    shown.push(this.#updateFoot(answer, isLast));
    if (answer.usage) shown.push(timeBar(answer));
    showChildren(this.element, shown);
  }

  // Reasoning is open until the answer begins.
  #updateReasoning({ reasoning, text, isLive }) {
    const shown = this.#reasoning.lastChild;
    shown.appendData(reasoning.slice(shown.length));
    const isDone = text !== "" || !isLive;
    if (isDone && !this.#reasoning.dataset.isDone) this.#reasoning.open = false;
    if (isDone) this.#reasoning.dataset.isDone = "true";
    return this.#reasoning;
  }

  #updateText({ text, isLive, isMarkdown }) {
    this.#text ??= isMarkdown ? new MarkdownView() : new PlainView();
    this.#text.update(text, isLive);
    return this.#text.element;
  }

  #updateTokens({ tokens }) {
    this.#tokens ??= new TokenView();
    this.#tokens.update(tokens);
    return this.#tokens.element;
  }

  // Each call as the model writes it. The last answer, once it is whole, takes the results.
  #updateCalls({ calls, isLive }, isLast) {
    calls.forEach(({ name, arguments: given }, index) => {
      this.#calls[index] ??= element("pre", { className: "call" }, element("b"), "");
      const [shownName, shown] = this.#calls[index].childNodes;
      shownName.textContent = name;
      shown.textContent = ` ${given}`;
    });
    if (!isLast || isLive) return this.#calls;
    this.#callForm ??= callForm(calls, this.#giveResults);
    return [...this.#calls, this.#callForm];
  }

  #updateFoot(answer, isLast) {
    this.#facts.textContent = facts(answer);
    const buttons = answer.isLive ? [] : [...(answer.text ? [this.#copy] : []), ...(isLast ? this.#buttons : [])];
    showChildren(this.#foot, [this.#facts, ...buttons]);
    return this.#foot;
  }
}

// Return a form with a field for the result of each call.
function callForm(calls, giveResults) {
  const fields = calls.map(({ name }) => {
    const field = element("textarea", { rows: 1, placeholder: `Result of ${name}` });
    field.setAttribute("aria-label", field.placeholder);
    return field;
  });
  const form = element("form", { className: "results" }, ...fields, element("button", { className: "main" }, "Give results"));
  form.onsubmit = (event) => {
    event.preventDefault();
    giveResults(calls.map(({ id, name }, index) => ({ id, name, content: fields[index].value })));
  };
  return form;
}

// A text as the model wrote it.
class PlainView {
  #shown = document.createTextNode("");
  element = element("div", { className: "answer plain" }, this.#shown);

  update(given) {
    const text = given.replace(/^\n+/, "");
    this.#shown.appendData(text.slice(this.#shown.length));
  }
}

// Return the item of an image, with the elements `after` it.
export function picture({ name, url }, ...after) {
  const shown = url ? element("img", { src: url, alt: name }) : element("small", {}, `${name}: not kept by this tab`);
  return element("li", { className: "picture" }, shown, ...after);
}

function facts(answer) {
  const { usage, state, finishReason, firstMs, startedMs, seed, sampling } = answer;
  const all = [];
  if (state === "waiting") all.push("waiting");
  if (state === "stopped") all.push("stopped");
  if (state === "failed") all.push("failed");
  if (finishReason === "length") all.push("cut at the maximum of tokens");
  if (answer.numTokens) all.push(`${whole.format(answer.numTokens)} tokens`);
  if (rateOf(answer)) all.push(rateOf(answer));
  if (firstMs !== null) all.push(`first text after ${duration(firstMs - startedMs)}`);
  if (usage) {
    const cached = usage.prompt_tokens_details.cached_tokens;
    all.push(`${whole.format(cached)} of ${whole.format(usage.prompt_tokens)} prompt tokens cached`);
  }
  all.push(...Object.entries(sampling).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`));
  if (!answer.isLive) all.push(`seed ${seed}`);
  return all.join(" · ");
}

function timeBar({ usage, startedMs, endedMs }) {
  const spent = PHASES.map((phase) => [phase, usage.timings[`${phase}_ms`]]);
  const known = spent.reduce((sum, [, ms]) => sum + ms, 0);
  const all = [...spent, ["other", Math.max(0, (endedMs ?? performance.now()) - startedMs - known)]];
  const total = all.reduce((sum, [, ms]) => sum + ms, 0) || 1;
  const bar = element("div", { className: "bar" });
  const legend = element("ul", { className: "legend" });
  for (const [phase, ms] of all) {
    const part = element("i", { className: phase });
    part.style.width = `${(100 * ms) / total}%`;
    bar.append(part);
    if (ms > 0) legend.append(element("li", {}, element("i", { className: phase }), `${phase} `, element("b", {}, duration(ms))));
  }
  return element("div", { className: "times", title: "Where the time went" }, bar, legend);
}
