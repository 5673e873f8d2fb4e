// Inline Markdown: text to a tree of emphasis, code, links and line breaks. Must not touch the document.
//
// A node is a string, or {kind: "code", text}, {kind: "link", href, children}, {kind: "break"}, or {kind, children} with
// the kind em, strong or del. HTML is text, except for <br>. Only addresses of http, https and mailto become links.

const MAX_DELIMITERS = 200; // unmatched at once; more of them are text, so that a hostile text costs little
const MAX_ADDRESS = 2000;
const KINDS = { 1: "em", 2: "strong" };

const SPECIAL = /[\\`*_~[\]!<\n]/g;
const ESCAPED = /[!-/:-@[-`{-~]/;
const SPACE = /\s/u;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const SAFE_ADDRESS = /^(?:https?:\/\/|mailto:)[^\s\p{C}]+$/iu;
const BETWEEN_ANGLES = /<((?:https?:\/\/|mailto:)[^\s\p{C}<>]{1,2000})>/iuy;
const LINE_BREAK = /<br ?\/?>/iy;
const TARGET = /\(\s*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.)*\))*))(?:\s+(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'))?\s*\)/y;
const BARE_ADDRESS = /(?<![\p{L}\p{N}_/])https?:\/\/[^\s\p{C}<>"`。，、；：！？）】」』]{1,2000}/giu;

// Return the nodes of a text. `isOpen`: more text follows, so bold text and code without an end last to the end.
export function parseInline(text, isOpen = false) {
  return new InlineParser(text, isOpen).parse();
}

class InlineParser {
  #text;
  #isOpen;
  #at = 0;
  #out = []; // the nodes; a delimiter or bracket is an object {text} until the end
  #openers = []; // delimiters that may begin emphasis: {node, char, count, canClose, size}, outermost first
  #brackets = []; // {node, isActive, numOpeners}
  #noBackticks = new Set(); // lengths of runs of backticks that do not come again

  constructor(text, isOpen) {
    this.#text = text;
    this.#isOpen = isOpen;
  }

  parse() {
    while (this.#at < this.#text.length) {
      SPECIAL.lastIndex = this.#at;
      const next = SPECIAL.exec(this.#text)?.index ?? this.#text.length;
      if (next > this.#at) this.#push(this.#text.slice(this.#at, next));
      this.#at = next;
      if (next < this.#text.length) this.#special(this.#text[next]);
    }
    if (this.#isOpen) this.#closeStrong();
    return linked(merged(this.#out));
  }

  #push(...nodes) {
    this.#out.push(...nodes);
  }

  #special(char) {
    if (char === "\n") return this.#break();
    if (char === "\\") return this.#escape();
    if (char === "`") return this.#code();
    if (char === "<") return this.#angle();
    if (char === "!" && this.#text[this.#at + 1] === "[") return this.#openBracket("![");
    if (char === "[") return this.#openBracket("[");
    if (char === "]") return this.#closeBracket();
    if (char === "!") return this.#literal(1);
    return this.#delimiter(char);
  }

  #literal(length) {
    this.#push(this.#text.slice(this.#at, this.#at + length));
    this.#at += length;
  }

  #break() {
    const last = this.#out.at(-1);
    if (typeof last === "string") this.#out[this.#out.length - 1] = last.trimEnd();
    this.#push({ kind: "break" });
    this.#at += 1;
  }

  #escape() {
    const next = this.#text[this.#at + 1] ?? "";
    if (next === "\n") return void (this.#at += 1); // the line break follows
    if (!ESCAPED.test(next)) return this.#literal(1);
    this.#at += 1;
    this.#literal(1);
  }

  #code() {
    const length = runLength(this.#text, this.#at);
    const start = this.#at + length;
    const end = this.#noBackticks.has(length) ? -1 : this.#endOfCode(start, length);
    if (end < 0 && !(this.#isOpen && start < this.#text.length)) {
      this.#noBackticks.add(length);
      return this.#literal(length);
    }
    const inside = this.#text.slice(start, end < 0 ? this.#text.length : end).replaceAll("\n", " ");
    const isPadded = /^ .*[^ ].* $|^ [^ ] $/.test(inside);
    this.#push({ kind: "code", text: isPadded ? inside.slice(1, -1) : inside });
    this.#at = end < 0 ? this.#text.length : end + length;
  }

  #endOfCode(start, length) {
    for (let at = this.#text.indexOf("`", start); at >= 0; ) {
      const found = runLength(this.#text, at);
      if (found === length) return at;
      at = this.#text.indexOf("`", at + found);
    }
    return -1;
  }

  #angle() {
    const address = matchAt(BETWEEN_ANGLES, this.#text, this.#at);
    const lineBreak = matchAt(LINE_BREAK, this.#text, this.#at);
    if (address) this.#push({ kind: "link", href: address[1], children: [address[1].replace(/^mailto:/i, "")] });
    if (lineBreak) this.#push({ kind: "break" });
    if (!address && !lineBreak) return this.#literal(1);
    this.#at += (address ?? lineBreak)[0].length;
  }

  // Links

  #openBracket(text) {
    const node = { text };
    this.#push(node);
    this.#at += text.length;
    this.#brackets.push({ node, isActive: true, numOpeners: this.#openers.length });
    if (this.#brackets.length > MAX_DELIMITERS) this.#brackets.shift();
  }

  #closeBracket() {
    const bracket = this.#brackets.pop();
    const target = bracket?.isActive && matchAt(TARGET, this.#text.slice(0, this.#at + MAX_ADDRESS), this.#at + 1);
    const href = target ? unescaped(target[1] ?? target[2]) : "";
    if (!SAFE_ADDRESS.test(href)) return this.#literal(1);
    const start = this.#out.lastIndexOf(bracket.node);
    const children = merged(this.#out.splice(start).slice(1));
    this.#openers.length = Math.min(this.#openers.length, bracket.numOpeners);
    for (const outer of this.#brackets) outer.isActive = false; // a link contains no link
    this.#push({ kind: "link", href, children: children.length ? children : [href] });
    this.#at += 1 + target[0].length;
  }

  // Emphasis

  #delimiter(char) {
    const size = runLength(this.#text, this.#at);
    const before = characterBefore(this.#text, this.#at), after = characterAt(this.#text, this.#at + size);
    const afterIsSpace = SPACE.test(after), beforeIsSpace = SPACE.test(before);
    const opens = !afterIsSpace && (!PUNCTUATION.test(after) || beforeIsSpace || PUNCTUATION.test(before));
    const closes = !beforeIsSpace && (!PUNCTUATION.test(before) || afterIsSpace || PUNCTUATION.test(after));
    if (char === "~" && size !== 2) return this.#literal(size);
    const canOpen = opens && (char !== "_" || !closes || PUNCTUATION.test(before));
    const canClose = closes && (char !== "_" || !opens || PUNCTUATION.test(after));
    this.#at += size;
    const run = { char, size, canOpen, canClose };
    const count = canClose ? this.#close(run) : size;
    if (!count) return;
    const node = { text: char.repeat(count) };
    this.#push(node);
    if (canOpen && this.#openers.length < MAX_DELIMITERS) this.#openers.push({ ...run, node, count });
  }

  // End what the run can end, and return how many of its characters are left.
  #close(run) {
    let count = run.size;
    while (count) {
      const index = this.#openers.findLastIndex((opener) => pairs(opener, run));
      if (index < 0) break;
      const used = Math.min(2, count, this.#openers[index].count);
      this.#wrap(index, used);
      count -= used;
    }
    return count;
  }

  // Make emphasis of all after the opener with this index. Delimiters and brackets in it are text.
  #wrap(index, used) {
    const opener = this.#openers[index];
    const children = merged(this.#out.splice(this.#out.lastIndexOf(opener.node) + 1));
    this.#openers.length = index + 1;
    while (this.#brackets.at(-1)?.numOpeners > index) this.#brackets.pop();
    opener.count -= used;
    opener.node.text = opener.char.repeat(opener.count);
    if (!opener.count) {
      this.#openers.pop();
      this.#out.pop();
    }
    this.#push({ kind: opener.char === "~" ? "del" : KINDS[used], children });
  }

  #closeStrong() {
    for (let index = this.#openers.length - 1; index >= 0; index -= 1) {
      const { char, count, node } = this.#openers[index];
      if (char !== "~" && count >= 2 && node !== this.#out.at(-1)) this.#wrap(index, 2);
    }
  }
}

// Return whether the opener and the run make emphasis: the rule of three keeps **a*b** and the like together.
function pairs(opener, run) {
  if (opener.char !== run.char) return false;
  if (run.char === "~") return true;
  const isAmbiguous = opener.canClose || run.canOpen;
  return !isAmbiguous || (opener.size + run.size) % 3 !== 0 || (opener.size % 3 === 0 && run.size % 3 === 0);
}

function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

const characterAt = (text, at) => (at < text.length ? String.fromCodePoint(text.codePointAt(at)) : " ");

function characterBefore(text, at) {
  if (!at) return " ";
  const isPair = /[\udc00-\udfff]/.test(text[at - 1]) && at > 1;
  return text.slice(at - (isPair ? 2 : 1), at);
}

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

const unescaped = (text) => text.replace(/\\([!-/:-@[-`{-~])/g, "$1");

// Return the nodes with delimiters and brackets that paired with nothing as text, and texts side by side as one.
function merged(nodes) {
  const all = [];
  for (const node of nodes) {
    const text = typeof node === "string" ? node : node.kind ? null : node.text;
    if (text === null) all.push(node);
    else if (typeof all.at(-1) === "string") all[all.length - 1] += text;
    else if (text) all.push(text);
  }
  return all;
}

// Return the nodes with addresses in their texts as links.
function linked(nodes) {
  return nodes.flatMap((node) => {
    if (typeof node === "string") return withLinks(node);
    return [node.kind === "link" || !node.children ? node : { ...node, children: linked(node.children) }];
  });
}

function withLinks(text) {
  if (!text.includes("//")) return [text]; // a search with the pattern is slow to begin
  const all = [];
  let at = 0;
  for (const { 0: found, index } of text.matchAll(BARE_ADDRESS)) {
    const href = withoutPunctuation(found);
    if (!/^https?:\/\/[\p{L}\p{N}[]/iu.test(href)) continue;
    if (index > at) all.push(text.slice(at, index));
    all.push({ kind: "link", href, children: [href] });
    at = index + href.length;
  }
  if (at < text.length) all.push(text.slice(at));
  return all;
}

// Return an address without the punctuation that ends the sentence around it.
function withoutPunctuation(address) {
  let end = address.length;
  let unopened = address.split(")").length - address.split("(").length;
  for (; end; end -= 1) {
    const last = address[end - 1];
    if (last === ")" && unopened-- > 0) continue;
    if (!"?!.,:;*_~'\"]".includes(last)) break;
  }
  return address.slice(0, end);
}
