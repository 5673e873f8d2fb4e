// Markdown as it streams: text to a tree of blocks, each line once. Must not touch the document.
//
// A block is {kind, version} with the children of a document, quote, list or item, the text of a paragraph or heading,
// the lines of a code block, or the rows of a table. `version` grows when the block or one below it changes. Only the last
// child of a block changes, or goes, until a child follows it. HTML is text.

const MAX_DEPTH = 16; // quotes and items in each other; deeper ones are text

const QUOTE = /^ {0,3}> ?/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*(.*)$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const UNDERLINE = /^ {0,3}(=+|-+)[ \t]*$/;
const MARKER = /^( {0,3})([-+*]|\d{1,9}[.)])(?=[ \t]|$)/;
const DELIMITERS = /^ {0,3}[|:-][\s|:-]*$/;
const DELIMITER = /^:?-+:?$/;
const BLANK = /^[ \t]*$/;
// The beginning of a line that may still become a fence, an item, a rule, a heading or a row of delimiters.
const UNDECIDED = /^[\s>]*(?:[`~|:=_*+#-][\s`~|:=_*+#-]*|\d{1,9}[.)]?)?$/;

export class MarkdownParser {
  document = { kind: "document", children: [], version: 0 };
  #containers = [this.document]; // containers that the next line may continue, outermost first
  #leaf = null; // the open paragraph, code block or table: the last child of the last container
  #isAfterBlank = false;
  #rest = ""; // the line that has not ended
  #undo = []; // functions that take the unfinished line out again
  #clock = 0;

  // Add text to the last line that `text` does not end, too, so that the document is what a reader may see now.
  append(text) {
    if (this.#undo.length && this.#leaf?.kind === "paragraph" && !text.includes("\n")) return this.#extend(text);
    this.#takeBack();
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    for (const line of lines) this.#line(line);
    this.#undo = [];
    if (UNDECIDED.test(this.#rest)) return undefined;
    const state = [[...this.#containers], this.#leaf, this.#isAfterBlank];
    this.#undo.push(() => ([this.#containers, this.#leaf, this.#isAfterBlank] = state));
    this.#line(this.#rest);
    return undefined;
  }

  // A line of a paragraph remains one, however it continues.
  #extend(text) {
    this.#rest += text;
    this.#leaf.text += text;
    this.#touch();
  }

  // The text has ended, and with it its last line.
  end() {
    this.#takeBack();
    if (this.#rest) this.#line(this.#rest);
    this.#rest = "";
    this.#undo = [];
  }

  #takeBack() {
    this.#touch();
    while (this.#undo.length) this.#undo.pop()();
    this.#touch();
  }

  #touch() {
    this.#clock += 1;
    for (const each of this.#containers) {
      each.version = this.#clock;
      if (each.list) each.list.version = this.#clock;
    }
    if (this.#leaf) this.#leaf.version = this.#clock;
  }

  #set(block, name, value) {
    const before = block[name];
    this.#undo.push(() => (block[name] = before));
    block[name] = value;
  }

  #push(array, value) {
    this.#undo.push(() => array.pop());
    array.push(value);
  }

  #line(ended) {
    this.#touch();
    this.#read(ended.endsWith("\r") ? ended.slice(0, -1) : ended);
    this.#touch();
  }

  // Lines

  #read(line) {
    const { rest: inside, numMatched } = this.#matched(line);
    const isContinued = numMatched === this.#containers.length;
    let rest = inside;
    if (isContinued && this.#leaf?.fence) return this.#fencedLine(this.#leaf, rest);
    if (isContinued && this.#leaf?.kind === "code" && indentOf(rest) >= 4) return this.#indentedLine(this.#leaf, rest);
    if (BLANK.test(rest)) return this.#blankLine(numMatched, isContinued);
    const paragraph = this.#leaf?.kind === "paragraph" ? this.#leaf : null;
    if (isContinued && paragraph && this.#followsParagraph(paragraph, rest)) return undefined;
    let open = isContinued ? paragraph : null; // the paragraph that a new block must be allowed to interrupt
    let isNew = false;
    const begin = () => {
      if (!isNew) this.#close(numMatched);
      isNew = true;
      open = null;
    };
    for (;;) {
      const next = this.#containers.length < MAX_DEPTH ? this.#container(rest, open, begin) : null;
      if (next === null) break;
      rest = next;
    }
    if (BLANK.test(rest)) return undefined; // an item that begins without text
    const block = this.#leafBlock(rest, open ?? (isNew ? null : paragraph));
    if (block) {
      begin();
      this.#add(block, block.lines || block.rows ? block : null);
    } else if (isContinued && !isNew && this.#leaf?.rows) {
      this.#push(this.#leaf.rows, cells(rest).slice(0, this.#leaf.alignments.length));
    } else if (!isNew && paragraph) { // a lazy continuation, also where a quote or an item has ended
      this.#set(paragraph, "text", `${paragraph.text}\n${rest.trimStart()}`);
    } else {
      begin();
      const added = { kind: "paragraph", text: rest.trimStart() };
      this.#add(added, added);
    }
    this.#isAfterBlank = false;
    return undefined;
  }

  // Return the line inside the containers that it continues, and how many these are.
  #matched(line) {
    let rest = line, numMatched = 1;
    for (const container of this.#containers.slice(1)) {
      if (container.kind === "quote") {
        if (!QUOTE.test(rest)) break;
        rest = rest.replace(QUOTE, "");
      } else if (BLANK.test(rest)) {
        if (!container.children.length) break;
      } else {
        if (indentOf(rest) < container.indent) break;
        rest = outdented(rest, container.indent);
      }
      numMatched += 1;
    }
    return { rest, numMatched };
  }

  #blankLine(numMatched, isContinued) {
    if (isContinued && this.#leaf?.kind === "code") this.#set(this.#leaf, "numBlank", this.#leaf.numBlank + 1);
    else this.#close(numMatched);
    this.#isAfterBlank = true;
  }

  // Blank lines count if code follows them.
  #indentedLine(block, line) {
    for (let number = 0; number < block.numBlank; number += 1) this.#push(block.lines, "");
    this.#set(block, "numBlank", 0);
    this.#push(block.lines, outdented(line, 4));
    this.#isAfterBlank = false;
  }

  #fencedLine(block, line) {
    const found = FENCE.exec(line);
    const isEnd = found && !found[3] && found[2][0] === block.fence[0] && found[2].length >= block.fence.length;
    if (isEnd) this.#leaf = null;
    else this.#push(block.lines, outdented(line, Math.min(block.indent, indentOf(line))));
  }

  // Return whether the line makes a heading or a table of the paragraph above it.
  #followsParagraph(paragraph, line) {
    const siblings = this.#containers.at(-1).children;
    const underline = UNDERLINE.exec(line);
    if (underline) {
      const level = underline[1][0] === "=" ? 1 : 2;
      this.#set(siblings, siblings.length - 1, this.#made({ kind: "heading", level, text: paragraph.text }));
      this.#leaf = null;
      return true;
    }
    if (!DELIMITERS.test(line)) return false;
    const delimiters = cells(line);
    if (!delimiters.every((each) => DELIMITER.test(each))) return false;
    const above = paragraph.text.split("\n");
    const header = cells(above.pop());
    if (header.length !== delimiters.length) return false;
    const table = this.#made({ kind: "table", alignments: delimiters.map(alignment), rows: [header] });
    if (above.length) {
      this.#set(paragraph, "text", above.join("\n"));
      this.#push(siblings, table);
    } else {
      this.#set(siblings, siblings.length - 1, table);
    }
    this.#leaf = table;
    return true;
  }

  // Containers

  // Begin the quote or item that the line begins. Return what follows on the line, or null if there is none.
  #container(line, paragraph, begin) {
    if (indentOf(line) >= 4) return null;
    if (QUOTE.test(line)) {
      begin();
      this.#enter({ kind: "quote", children: [] });
      return line.replace(QUOTE, "");
    }
    const found = RULE.test(line) ? null : MARKER.exec(line);
    if (!found) return null;
    const [whole, before, marker] = found;
    const rest = line.slice(whole.length);
    if (paragraph && (BLANK.test(rest) || !/^(?:[-+*]|1[.)])$/.test(marker))) return null;
    begin();
    const spaces = indentOf(rest);
    const padding = BLANK.test(rest) || spaces > 4 ? 1 : spaces;
    const indent = before.length + marker.length + padding;
    this.#enter({ kind: "item", children: [], indent, list: this.#listFor(marker) });
    return outdented(rest, Math.min(padding, spaces));
  }

  // Return the list that an item with this marker belongs to: the last block, or a new one.
  #listFor(marker) {
    const type = marker.at(-1);
    const last = this.#containers.at(-1).children.at(-1);
    if (last?.kind === "list" && last.type === type) {
      if (this.#isAfterBlank) this.#set(last, "isLoose", true);
      return last;
    }
    const number = /\d/.test(marker) ? Number.parseInt(marker, 10) : null;
    const list = this.#made({ kind: "list", type, number, isLoose: false, children: [] });
    this.#add(list, null);
    return list;
  }

  #enter(container) {
    const made = this.#made(container);
    if (made.list) this.#push(made.list.children, made);
    else this.#add(made, null);
    this.#isAfterBlank = false;
    this.#containers.push(made); // the state that an unfinished line restores has a copy
  }

  // Leave the containers that the line does not continue, and the block in the last one.
  #close(numMatched) {
    this.#containers.length = numMatched;
    this.#leaf = null;
  }

  // Blocks without blocks in them

  #leafBlock(line, paragraph) {
    if (indentOf(line) >= 4) {
      return paragraph ? null : { kind: "code", language: "", fence: "", numBlank: 0, lines: [outdented(line, 4)] };
    }
    const heading = HEADING.exec(line);
    if (heading) return { kind: "heading", level: heading[1].length, text: headingText(line.slice(heading[0].length)) };
    if (RULE.test(line)) return { kind: "rule" };
    const fence = FENCE.exec(line);
    if (fence && !(fence[2][0] === "`" && fence[3].includes("`"))) {
      const [language] = fence[3].trim().split(/\s/);
      return { kind: "code", language, fence: fence[2], indent: fence[1].length, lines: [] };
    }
    return null;
  }

  #add(block, leaf) {
    const container = this.#containers.at(-1);
    if (this.#isAfterBlank && container.list && container.children.length) this.#set(container.list, "isLoose", true);
    this.#push(container.children, block.version ? block : this.#made(block));
    this.#leaf = leaf;
  }

  #made(block) {
    return Object.assign(block, { version: this.#clock });
  }
}

// Return the columns of the space that a line begins with: a tab goes to the next multiple of 4.
function indentOf(line) {
  let columns = 0;
  for (const char of line) {
    if (char === " ") columns += 1;
    else if (char === "\t") columns += 4 - (columns % 4);
    else break;
  }
  return columns;
}

// Return the line without its first columns, which are space. A tab that reaches beyond them becomes spaces.
function outdented(line, columns) {
  let at = 0, gone = 0;
  while (gone < columns && at < line.length) {
    gone += line[at] === "\t" ? 4 - (gone % 4) : 1;
    at += 1;
  }
  return " ".repeat(Math.max(0, gone - columns)) + line.slice(at);
}

// Return the text of a heading without the number signs that may end it.
function headingText(given) {
  const text = given.trim();
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  return end === 0 || /[ \t]/.test(text[end - 1]) ? text.slice(0, end).trimEnd() : text;
}

// Return the cells of a table's row. A bar after a backslash is text.
function cells(line) {
  const row = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return row.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function alignment(cell) {
  if (cell.endsWith(":")) return cell.startsWith(":") ? "center" : "right";
  return cell.startsWith(":") ? "left" : "";
}
