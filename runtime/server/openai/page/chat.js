// The page: which conversation is shown, what its buttons and keys do, and when it is drawn again.

import { saveKey, savedKey, servedModels } from "./api.js";
import { Conversation, load, save } from "./conversations.js";
import { element, showChildren } from "./elements.js";
import { Search } from "./search.js";
import { TurnView, picture } from "./turn_view.js";
import { conversationItem, settingFields } from "./view.js";

const DRAW_EVERY_MS = 60;
const WATCH_EVERY_MS = 5000; // pause between two looks at the states of several models
const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const PROMPTS = [
  "What is a queue?",
  "Explain in three sentences how a CPU cache works.",
  "Write a Python function that returns the n-th Fibonacci number, and a test for it.",
  "Name five ways to make a web page load faster, the most effective first.",
  "Rewrite more politely: Send me the report now.",
  "Return a JSON object with the name, the capital and the population of three countries.",
];
const SHORTCUTS = [ // [keys for people, code with Alt, what it does, action]
  ["Alt N", "KeyN", "new conversation", () => open(new Conversation(current.settings))],
  ["Alt ↑", "ArrowUp", "previous conversation", () => step(-1)],
  ["Alt ↓", "ArrowDown", "next conversation", () => step(1)],
  ["Alt R", "KeyR", "ask the last message again", () => retry()],
  ["Alt E", "KeyE", "change the last message", () => edit()],
  ["Alt V", "KeyV", "show tokens and their probabilities, or text", () => toggleTokens()],
  ["Alt I", "KeyI", "add images, for a model that takes them", () => canAttach() && $("files").click()],
  ["Alt S", "KeyS", "show or hide the settings", () => toggleSettings()],
  ["Alt /", "Slash", "show these shortcuts", () => $("help").showModal()],
];
const OTHER_KEYS = [
  ["Enter", "send the message; Shift Enter starts a new line"],
  ["Escape", "stop the answer"],
];

const $ = (id) => document.getElementById(id);

let generators = []; // models that generate text; none until the server has said them
let served = null; // the model of the current conversation, one of them
let conversations = load();
let current = conversations[0] ?? new Conversation();
let showsTokens = false;
if (!conversations.length) conversations.push(current);

// Actions

function open(conversation) {
  current.draft = $("question").value;
  if (!conversations.includes(conversation)) conversations.unshift(conversation);
  current = conversation;
  compose(current.draft);
  useModel();
  $("log").replaceChildren();
  drawn.clear();
  draw();
  $("log").scrollTop = $("log").scrollHeight;
}

function step(by) {
  const index = conversations.indexOf(current) + by;
  if (conversations[index]) open(conversations[index]);
}

function remove(conversation) {
  conversation.stop();
  conversations = conversations.filter((each) => each !== conversation);
  if (!conversations.length) conversations.push(new Conversation(conversation.settings));
  if (conversation === current) open(conversations[0]);
  save(conversations);
  draw();
}

function send() {
  const question = $("question").value, images = canAttach() ? current.images : NO_IMAGES;
  if (!served || current.live || !(question.trim() || images.length)) return;
  if (images.length) current.images = [];
  $("image-problem").textContent = "";
  compose("");
  ask({ question, images });
}

async function ask(asking) {
  const asked = current;
  stickToEnd = true;
  try {
    await asked.ask(asking, served, changed);
  } catch (error) {
    if (error.status !== 401) throw error;
    askForKey(error.message);
  }
  const { state, numTokens } = asked.turns.at(-1).answer;
  if (asked === current) $("announcement").textContent = `The answer is ${state}: ${numTokens} tokens.`;
  save(conversations);
  watchModels(); // the request may have loaded its model
}

function giveResults(results) {
  if (served && !current.live) ask({ question: "", images: [], results });
}

function retry() {
  if (served && current.turns.length && !current.live) ask(current.takeBack());
}

function edit() {
  if (!current.turns.length || current.live) return;
  const { question, images } = current.takeBack();
  current.images = images.filter(({ url }) => url);
  compose(question);
  draw();
}

function toggleTokens() {
  showsTokens = !showsTokens;
  $("raw").setAttribute("aria-pressed", showsTokens);
  drawn.clear();
  draw();
}

function toggleSettings() {
  const shows = $("settings").hidden;
  $("settings").hidden = !shows;
  $("open-settings").setAttribute("aria-expanded", shows);
  (shows ? $("fields").querySelector("select, input, textarea") : $("question")).focus();
}

// Images of the message that is being written

const NO_IMAGES = [];
const canAttach = () => served?.takesImages && current.settings.mode === "chat";

async function attach(files) {
  const conversation = current;
  const allowed = [...files].filter(({ type }) => IMAGE_TYPES.includes(type));
  const others = [...files].filter((file) => !allowed.includes(file)).map(({ name }) => name);
  $("image-problem").textContent = others.length ? `${others.join(", ")}: images are PNG, JPEG, WebP or GIF files` : "";
  const urls = await Promise.all(allowed.map(dataUrl));
  conversation.images = [...conversation.images, ...urls.map((url, index) => ({ name: allowed[index].name, url }))];
  draw();
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function drawAttached() {
  $("attach").hidden = !canAttach();
  const images = canAttach() ? current.images : NO_IMAGES;
  if (images === drawnImages) return;
  drawnImages = images;
  $("attached").replaceChildren(...images.map((image) => {
    const remove = element("button", { type: "button", title: "Remove" }, "×");
    remove.setAttribute("aria-label", `Remove: ${image.name}`);
    remove.onclick = () => {
      current.images = current.images.filter((each) => each !== image);
      $("question").focus();
      draw();
    };
    return picture(image, remove);
  }));
}

// The server's models, and the key that it may ask for

async function connect() {
  try {
    const { encoder, ...found } = await servedModels();
    ({ generators } = found);
    const isBoth = generators.length > 0 && encoder !== null;
    $("model").textContent = [generators[0], encoder].filter((each) => each).map(({ name }) => name).filter(isFirst).join(", ");
    if (encoder) new Search(encoder, askForKey);
    for (const id of ["show-chat", "show-search"]) $(id).hidden = !isBoth;
    drawModels();
    if (generators.length) useModel();
    else show("search");
  } catch (error) {
    $("model").textContent = error.message;
    if (error.status === 401) askForKey(savedKey() ? error.message : "");
    else setTimeout(connect, error.retryMs ?? 2000);
  }
  draw();
}

const isFirst = (name, index, names) => names.indexOf(name) === index;

// Show the states of several models. The picked one is the conversation's.
function drawModels() {
  $("models").hidden = generators.length < 2;
  $("model").hidden = generators.length > 1;
  showChildren($("models"), generators.map(({ name, state }, index) => {
    const option = $("models").children[index] ?? element("option");
    return Object.assign(option, { value: name, textContent: state === "ready" ? name : `${name} (${state})` });
  }));
}

async function watchModels() {
  if (document.hidden || generators.length < 2) return;
  const found = await servedModels().catch(() => null); // the next answer says what the matter is
  if (!found?.generators.length) return;
  ({ generators } = found);
  drawModels();
  chooseModel();
}

// Choose the model of the current conversation. Without a chat template, a conversation that begins continues a text.
function chooseModel() {
  served = generators.find(({ name }) => name === current.settings.model) ?? generators[0] ?? null;
  if (!served) return;
  $("models").value = served.name;
  if (!served.can("chat") && !current.turns.length) current.settings.mode = "text";
}

function useModel() {
  chooseModel();
  if (served) noteDefaults();
  drawSettings();
}

function noteDefaults() {
  const sent = Object.entries(served.pageSampling).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`);
  $("defaults-note").textContent = sent.length
    ? `The model recommends no sampling: where the fields are empty, this page sends ${sent.join(" and ")}.`
    : "An empty field leaves the choice to the server, which takes the values in gray.";
}

function show(view) {
  const isSearch = view === "search";
  document.body.className = view;
  $("search").hidden = !isSearch;
  $("show-chat").setAttribute("aria-pressed", !isSearch);
  $("show-search").setAttribute("aria-pressed", isSearch);
  (isSearch ? $("query") : $("question")).focus();
}

function askForKey(problem) {
  $("key-problem").textContent = problem;
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

$("key-form").onsubmit = (event) => {
  event.preventDefault();
  saveKey($("key").value.trim());
  $("key").value = "";
  $("key-dialog").close();
  connect();
};

// Drawing: after a change, of what has changed, and not often, since the server may need the same processor

const items = new WeakMap(); // conversation -> its item in the list
const drawn = new Map(); // turn -> {view, version, isLast}
let drawnImages = null; // images of the composer
let stickToEnd = true;
let isDrawPending = false;

function changed() {
  if (isDrawPending) return;
  isDrawPending = true;
  setTimeout(() => {
    isDrawPending = false;
    draw();
  }, DRAW_EVERY_MS);
}

function draw() {
  drawList();
  drawTurns();
  drawAttached();
  const isLive = current.live !== null;
  $("send").hidden = isLive;
  $("send").disabled = !served;
  $("stop").hidden = !isLive;
  if (stickToEnd) $("log").scrollTop = $("log").scrollHeight;
}

function drawList() {
  const shown = conversations.map((each) => {
    if (!items.has(each)) items.set(each, conversationItem(each, { select: () => open(each), remove: () => remove(each) }));
    const { item, update } = items.get(each);
    update(each === current);
    return item;
  });
  showChildren($("list"), shown);
}

function drawTurns() {
  const articles = current.turns.map((turn) => {
    const isLast = turn === current.turns.at(-1);
    const before = drawn.get(turn);
    if (before?.version === turn.answer.version && before.isLast === isLast) return before.view.element;
    const view = before?.view ?? new TurnView(turn, { retry, edit, giveResults });
    view.update({ showsTokens, isLast });
    drawn.set(turn, { view, version: turn.answer.version, isLast });
    return view.element;
  });
  if (articles.length) showChildren($("log"), articles);
  else if (!$("log").querySelector(".prompts")) $("log").replaceChildren(promptPicker());
}

function drawSettings() {
  const defaults = { ...served?.defaultSampling, ...served?.pageSampling };
  $("fields").replaceChildren(...settingFields(current.settings, defaults));
}

function promptPicker() {
  const buttons = PROMPTS.map((prompt) => element("button", { type: "button", onclick: () => compose(prompt) }, prompt));
  return element("section", { className: "prompts" }, element("h2", {}, "Pick a prompt, or write one"), ...buttons);
}

function compose(text) {
  $("question").value = text;
  fitComposer();
  $("question").focus();
}

function fitComposer() {
  const box = $("question");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + box.offsetHeight - box.clientHeight}px`;
}

// Events

$("log").onscroll = () => {
  const { scrollTop, scrollHeight, clientHeight } = $("log");
  stickToEnd = scrollHeight - scrollTop - clientHeight < 40;
};
$("question").oninput = fitComposer;
$("question").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
};
$("question").onpaste = (event) => {
  const { files } = event.clipboardData;
  if (!files.length || !canAttach()) return;
  event.preventDefault();
  attach(files);
};
$("attach").onclick = () => $("files").click();
$("files").onchange = () => {
  attach($("files").files);
  $("files").value = ""; // cleared, so that the same file can be chosen again
  $("question").focus();
};
document.body.ondragover = (event) => {
  if (canAttach() && event.dataTransfer.types.includes("Files")) event.preventDefault();
};
document.body.ondrop = (event) => {
  if (!canAttach() || !event.dataTransfer.files.length) return;
  event.preventDefault();
  attach(event.dataTransfer.files);
};
$("composer").onsubmit = (event) => {
  event.preventDefault();
  send();
};
$("stop").onclick = () => current.stop();
$("new").onclick = () => open(new Conversation(current.settings));
$("models").onchange = () => {
  current.settings.model = $("models").value;
  useModel();
  draw();
};
$("show-chat").onclick = () => show("chat");
$("show-search").onclick = () => show("search");
$("raw").onclick = toggleTokens;
$("open-settings").onclick = toggleSettings;
$("open-help").onclick = () => $("help").showModal();
$("key-dialog").oncancel = (event) => event.preventDefault(); // the page can do nothing without a key

document.onkeydown = (event) => {
  if (document.querySelector("dialog[open]") || document.body.className === "search") return;
  if (event.key === "Escape") current.stop();
  const shortcut = event.altKey && !event.ctrlKey && !event.metaKey && SHORTCUTS.find(([, code]) => code === event.code);
  if (!shortcut) return;
  event.preventDefault();
  const [, , , act] = shortcut;
  act();
};
document.onvisibilitychange = watchModels;
window.onbeforeunload = () => conversations.forEach((each) => each.stop()); // stopped answers do not count as failed
window.onpagehide = () => save(conversations);

$("shortcuts").append(...[...OTHER_KEYS, ...SHORTCUTS.map(([keys, , does]) => [keys, does])].map(([keys, does]) =>
  element("div", {}, element("dt", {}, element("kbd", {}, keys)), element("dd", {}, does))));
drawSettings();
setInterval(watchModels, WATCH_EVERY_MS);
$("fields").addEventListener("input", drawAttached); // the mode has changed
connect();
