// Draws conversations, turns, tokens and settings. Strings of models and users are set as text, never as markup.

import { SETTINGS } from "./conversations.js";

const PHASES = ["queue", "prefill", "decode", "stall"];
// A token's class by its probability: the first whose limit it reaches.
const LEVELS = [[0.9, "p90"], [0.5, "p50"], [0.2, "p20"], [0.05, "p5"], [0.01, "p1"], [0, "p0"]];

const whole = new Intl.NumberFormat("en");

export function element(tag, properties = {}, ...content) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...content);
  return made;
}

// Numbers for people

function duration(ms) {
  if (ms < 0.95) return `${(ms * 1000).toFixed(0)} µs`;
  if (ms < 99.5) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${ms.toFixed(0)} ms`;
  return `${(ms / 1000).toFixed(ms < 9995 ? 2 : 1)} s`;
}

function percent(share) {
  if (share > 0 && share < 0.001) return "< 0.1 %";
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}

const rate = (answer) => (answer.rate === null ? "" : `${answer.rate.toFixed(answer.rate < 100 ? 1 : 0)} tokens/s`);

// The list of conversations

// Return the item of a conversation, and what draws its present state: items stay in the document while answers grow,
// so that they keep the focus.
export function conversationItem(conversation, { select, remove }) {
  const title = element("span", { className: "title" });
  const state = element("small");
  const open = element("button", { type: "button", className: "open", onclick: select }, title, state);
  const close = element("button", { type: "button", className: "close", title: "Delete", onclick: remove }, "×");
  const item = element("li", {}, open, close);
  const update = (isCurrent) => {
    const { live, turns } = conversation;
    title.textContent = open.title = conversation.title;
    state.textContent = live ? rate(live) || "waiting" : turns.at(-1)?.answer.state === "failed" ? "failed" : "";
    item.className = live ? "live" : "";
    open.setAttribute("aria-current", isCurrent);
    close.setAttribute("aria-label", `Delete: ${conversation.title}`);
  };
  return { item, update };
}

// A turn: the question, the answer, and where its time went

export function turnArticle({ question, images, answer }, { showsTokens, isLast, retry, edit }) {
  const article = element("article", { className: answer.state });
  const asked = element("div", { className: "question" }, question);
  if (images.length) asked.prepend(element("ul", { className: "pictures" }, ...images.map((image) => picture(image))));
  article.append(asked);
  if (answer.reasoning) {
    const open = answer.isLive && !answer.text;
    article.append(element("details", { className: "reasoning", open }, element("summary", {}, "Reasoning"), answer.reasoning));
  }
  article.append(showsTokens && answer.tokens.length ? tokenView(answer.tokens) : textView(answer.text));
  if (showsTokens && !answer.tokens.length && answer.text) {
    article.append(element("p", { className: "note" }, "No probabilities: they were not asked for, or the page was loaded again."));
  }
  if (answer.problem) article.append(element("p", { className: "problem", role: "alert" }, answer.problem));
  const foot = element("footer", {}, element("span", { className: "facts" }, facts(answer)));
  if (isLast && !answer.isLive) {
    foot.append(
      element("button", { type: "button", className: "retry", title: "Ask again (Alt R)", onclick: retry }, "Retry"),
      element("button", { type: "button", className: "edit", title: "Change the message (Alt E)", onclick: edit }, "Edit"));
  }
  article.append(foot);
  if (answer.usage) article.append(timeBar(answer));
  return article;
}

// Return the item of an image, with the elements `after` it.
export function picture({ name, url }, ...after) {
  const shown = url ? element("img", { src: url, alt: name }) : element("small", {}, `${name}: not kept by this tab`);
  return element("li", { className: "picture" }, shown, ...after);
}

// Text with its code blocks, which are between lines of three backticks.
function textView(text) {
  const view = element("div", { className: "answer" });
  text.replace(/^\n+/, "").split(/^```(.*)$/m).forEach((part, index) => {
    // Even parts are alternately text and code; odd ones are what follows the backticks: a language.
    if (index % 4 === 0 && part) view.append(part);
    if (index % 4 === 2) view.append(element("pre", {}, element("code", {}, part.replace(/^\n|\n$/g, ""))));
  });
  return view;
}

function facts(answer) {
  const { usage, state, finishReason, firstMs, startedMs, seed } = answer;
  const all = [];
  if (state === "waiting") all.push("waiting");
  if (state === "stopped") all.push("stopped");
  if (state === "failed") all.push("failed");
  if (finishReason === "length") all.push("cut at the maximum of tokens");
  if (answer.numTokens) all.push(`${whole.format(answer.numTokens)} tokens`);
  if (rate(answer)) all.push(rate(answer));
  if (firstMs !== null) all.push(`first text after ${duration(firstMs - startedMs)}`);
  if (usage) {
    const cached = usage.prompt_tokens_details.cached_tokens;
    all.push(`${whole.format(cached)} of ${whole.format(usage.prompt_tokens)} prompt tokens cached`);
  }
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

// Tokens with their probabilities

function tokenView(tokens) {
  const spans = tokens.map((token) => element("span", { className: `token ${level(token.logprob)}` }, ...visible(token)));
  const detail = element("div", { className: "detail" }, "Select a token with the pointer, or with the arrow keys.");
  const line = element("div", { className: "answer tokens", tabIndex: 0 }, ...spans);
  line.setAttribute("aria-label", "Tokens; arrow keys select one");
  let selected = -1;
  const select = (index) => {
    spans[selected]?.classList.remove("selected");
    selected = Math.max(0, Math.min(index, spans.length - 1));
    spans[selected].classList.add("selected");
    detail.replaceChildren(...alternatives(tokens[selected]));
  };
  line.onclick = ({ target }) => {
    const index = spans.indexOf(target.closest(".token"));
    if (index >= 0) select(index);
  };
  line.onkeydown = (event) => {
    const moved = { ArrowRight: selected + 1, ArrowLeft: selected - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (moved === undefined || event.altKey) return;
    event.preventDefault();
    select(moved);
  };
  return element("div", {}, line, legendOfLevels(), detail);
}

const level = (logprob) => LEVELS.find(([limit]) => Math.exp(logprob) >= limit)[1];

// Return what shows a token: its line breaks get a sign, and bytes that are no whole character are in hexadecimal.
function visible({ text, bytes }) {
  if (text.includes("\ufffd") && bytes) return [bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ")];
  return text === "" ? ["∅"] : [text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t")];
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

// The settings of a conversation

export function settingFields(settings) {
  return SETTINGS.map(({ name, label, kind, note, step, min }) => {
    const set = ({ target }) => {
      settings[name] = kind === "check" ? target.checked : target.value;
    };
    let input;
    if (Array.isArray(kind)) {
      input = element("select", {}, ...kind.map((choice) => element("option", { value: choice }, choice)));
    } else if (kind === "text") {
      input = element("textarea", { rows: 2 });
    } else if (kind === "check") {
      input = element("input", { type: "checkbox", checked: settings[name] });
    } else {
      input = element("input", { type: "number", step, min: min ?? "" });
    }
    if (kind !== "check") input.value = settings[name];
    Object.assign(input, { name, oninput: set });
    const made = element("label", { className: kind === "check" ? "check" : "" }, element("span", {}, label), input);
    if (note) made.append(element("small", {}, note));
    return made;
  });
}
