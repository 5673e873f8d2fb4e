// Draws the list of conversations, and their settings.

import { SETTINGS } from "./conversations.js";
import { element, rateOf } from "./elements.js";

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
    state.textContent = live ? rateOf(live) || "waiting" : turns.at(-1)?.answer.state === "failed" ? "failed" : "";
    item.className = live ? "live" : "";
    open.setAttribute("aria-current", isCurrent);
    close.setAttribute("aria-label", `Delete: ${conversation.title}`);
  };
  return { item, update };
}

// The settings of a conversation

// Return the fields of the settings. An empty one shows which of `defaults` applies.
export function settingFields(settings, defaults) {
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
      input = element("input", { type: "number", step, min: min ?? "", placeholder: defaults[name] ?? "" });
    }
    if (kind !== "check") input.value = settings[name];
    Object.assign(input, { name, oninput: set });
    const made = element("label", { className: kind === "check" ? "check" : "" }, element("span", {}, label), input);
    if (note) made.append(element("small", {}, note));
    return made;
  });
}
