// Draws Markdown as it streams: blocks that are complete stay in the document, and only the last ones are drawn again.

import { copyButton, element } from "./elements.js";
import { parseInline } from "./inline.js";
import { MarkdownParser } from "./markdown.js";

const MAX_PIECE = 8192; // characters of a paragraph whose emphasis is found together
const FIRST_LEVEL = 3; // level of headings: higher ones are the page's own

export class MarkdownView {
  element = element("div", { className: "answer markdown" });
  #parser = new MarkdownParser();
  #children = new Children(this.element);
  #numRead = 0;
  #isEnded = false;

  // Show a text that begins with the text of the last call.
  update(text, isLive) {
    if (this.#isEnded) return;
    this.#parser.append(text.slice(this.#numRead));
    this.#numRead = text.length;
    if (!isLive) this.#parser.end();
    this.#isEnded = !isLive;
    this.#children.update(this.#parser.document.children, isLive);
  }
}

// The children of a block, in the order of the document. Only the last two can have changed since the last update.
class Children {
  #parent;
  #shown = []; // {block, view, version}

  constructor(parent) {
    this.#parent = parent;
  }

  update(blocks, isLive) {
    for (let index = Math.max(0, this.#shown.length - 2); index < Math.max(blocks.length, this.#shown.length); index += 1) {
      const shown = this.#shown[index], block = blocks[index];
      if (shown && shown.block !== block) {
        for (const { view } of this.#shown.splice(index)) view.element.remove();
      }
      if (!block) break;
      if (!this.#shown[index]) this.#add(block);
      const now = this.#shown[index];
      const isOpen = isLive && index === blocks.length - 1;
      if (now.version !== block.version || now.isOpen !== isOpen) now.view.update(block, isOpen);
      Object.assign(now, { version: block.version, isOpen });
    }
  }

  #add(block) {
    const view = new VIEWS[block.kind](block);
    this.#shown.push({ block, view, version: 0, isOpen: false });
    this.#parent.append(view.element);
  }
}

class ContainerView {
  #children;

  constructor(block) {
    this.element = element(...containerTag(block));
    this.#children = new Children(this.element);
  }

  update(block, isOpen) {
    if (block.kind === "list") this.element.className = block.isLoose ? "loose" : "";
    this.#children.update(block.children, isOpen);
  }
}

function containerTag({ kind, number }) {
  if (kind === "quote") return ["blockquote"];
  if (kind === "item") return ["li"];
  return number === null ? ["ul"] : ["ol", { start: number }];
}

// A long paragraph is drawn in pieces, of which only the last one changes.
class TextView {
  #ends = []; // ends of the complete pieces

  constructor({ kind, level }) {
    this.element = kind === "heading" ? element(`h${Math.min(6, FIRST_LEVEL + level - 1)}`, { className: `level${level}` }) : element("p");
  }

  update({ text }, isOpen) {
    let start = this.#ends.at(-1) ?? 0;
    if (start > text.length) { // the lines at its end are a table now
      this.#ends = [];
      start = 0;
    }
    while (this.element.childNodes.length > this.#ends.length) this.element.lastChild.remove();
    for (; text.length - start > MAX_PIECE; start = this.#ends.at(-1)) {
      this.#ends.push(endOfPiece(text, start));
      this.element.append(piece(text.slice(start, this.#ends.at(-1)), false));
    }
    this.element.append(piece(text.slice(start), isOpen));
  }
}

function endOfPiece(text, start) {
  const last = start + MAX_PIECE;
  const end = Math.max(text.lastIndexOf(" ", last), text.lastIndexOf("\n", last));
  if (end > start) return end;
  return /[\udc00-\udfff]/.test(text[last]) ? last - 1 : last;
}

const piece = (text, isOpen) => element("span", {}, ...inlineNodes(parseInline(text, isOpen)));

class CodeView {
  #code = element("code");

  constructor({ language }) {
    const head = element("div", { className: "code-head" }, element("span", {}, language), copyButton(() => this.#code.textContent, "Copy this code"));
    this.element = element("div", { className: "code" }, head, element("pre", {}, this.#code));
  }

  update({ lines }) {
    const shown = this.#code.childNodes;
    const numKept = Math.max(0, Math.min(shown.length, lines.length) - 2);
    while (shown.length > numKept) this.#code.lastChild.remove();
    for (let index = shown.length; index < lines.length; index += 1) this.#code.append(index ? `\n${lines[index]}` : lines[index]);
  }
}

class TableView {
  #head = element("thead");
  #body = element("tbody");

  constructor() {
    this.element = element("div", { className: "table" }, element("table", {}, this.#head, this.#body));
  }

  update({ rows, alignments }) {
    if (!this.#head.firstChild) this.#head.append(tableRow("th", rows[0], alignments));
    const numKept = Math.max(0, Math.min(this.#body.childElementCount, rows.length - 1) - 1);
    while (this.#body.childElementCount > numKept) this.#body.lastChild.remove();
    for (let index = this.#body.childElementCount + 1; index < rows.length; index += 1) {
      this.#body.append(tableRow("td", rows[index], alignments));
    }
  }
}

function tableRow(tag, cells, alignments) {
  return element("tr", {}, ...cells.map((cell, index) => element(tag, { className: alignments[index] }, ...inlineNodes(parseInline(cell)))));
}

class RuleView {
  element = element("hr");
  update() {}
}

const VIEWS = {
  quote: ContainerView, list: ContainerView, item: ContainerView, paragraph: TextView, heading: TextView,
  code: CodeView, table: TableView, rule: RuleView,
};

function inlineNodes(nodes) {
  return nodes.map((node) => {
    if (typeof node === "string") return node;
    if (node.kind === "code") return element("code", {}, node.text);
    if (node.kind === "break") return element("br");
    const children = inlineNodes(node.children);
    if (node.kind !== "link") return element(node.kind, {}, ...children);
    const { href } = node; // the parser lets http, https and mailto through
    return element("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
  });
}
