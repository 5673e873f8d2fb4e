// Elements of the page, and numbers as people read them. Strings of models and users are set as text, never as markup.

export function element(tag, properties = {}, ...content) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...content);
  return made;
}

// Show the children in this order, and leave them alone if they are there already.
export function showChildren(parent, shown) {
  const isShown = shown.length === parent.childNodes.length && shown.every((each, index) => each === parent.childNodes[index]);
  if (!isShown) parent.replaceChildren(...shown);
}

// Return a button that copies what `text` returns at that time.
export function copyButton(text, title) {
  const button = element("button", { type: "button", className: "copy", title }, "Copy");
  button.onclick = async () => {
    const isCopied = await copied(text());
    button.textContent = isCopied ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  return button;
}

// Browsers have a clipboard for pages of this machine and of TLS only; other pages copy a selection.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const box = element("textarea", { value: text, className: "unseen" });
    const before = document.activeElement;
    document.body.append(box);
    box.select();
    const isCopied = document.execCommand("copy");
    box.remove();
    before?.focus();
    return isCopied;
  }
}

// Numbers

export const whole = new Intl.NumberFormat("en");

export function duration(ms) {
  if (ms < 0.95) return `${(ms * 1000).toFixed(0)} µs`;
  if (ms < 99.5) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${ms.toFixed(0)} ms`;
  return `${(ms / 1000).toFixed(ms < 9995 ? 2 : 1)} s`;
}

export function percent(share) {
  if (share > 0 && share < 0.001) return "< 0.1 %";
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}

export const rateOf = (answer) => (answer.rate === null ? "" : `${answer.rate.toFixed(answer.rate < 100 ? 1 : 0)} tokens/s`);
