// Draws status.json (class Status in status.py) once a second while the page is visible. Clients' strings are set as
// text, never as markup.
"use strict";

const MAX_CELLS = 480;
const PERIOD_MS = 1000;
const PHASES = ["queue", "prefill", "decode", "stall"];

const $ = (id) => document.getElementById(id);

// Numbers for people

const whole = new Intl.NumberFormat("en");
const count = (value) => (value === null || value === undefined ? "–" : whole.format(Math.round(value)));
const percent = (share) => `${(100 * share).toFixed(share < 0.1 && share > 0 ? 1 : 0)} %`;

function duration(seconds) {
  if (seconds === null) return "–";
  if (seconds < 0.00095) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 0.0995) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${(seconds * 1e3).toFixed(0)} ms`;
  if (seconds < 9.995) return `${seconds.toFixed(2)} s`;
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} days`;
}

// Elements

function element(tag, className, ...content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...content);
  return made;
}

const cell = (className, ...content) => element("td", className, ...content);

function bar(parts) { // [class, share of the whole width, 0 to 1]
  const made = element("div", "bar");
  for (const [className, share] of parts) {
    const part = element("i", className);
    part.style.width = `${100 * share}%`;
    made.append(part);
  }
  return made;
}

function legend(list, entries) { // [class, name, text]
  list.replaceChildren(...entries.map(([className, name, text]) => {
    const entry = element("li", "", element("i", className), `${name} `);
    if (text !== undefined) entry.append(element("b", "", text));
    return entry;
  }));
}

function rows(body, columns, made, placeholder) {
  if (made.length) {
    body.replaceChildren(...made);
  } else {
    const only = cell("empty", placeholder);
    only.colSpan = columns;
    body.replaceChildren(element("tr", "", only));
  }
}

function counts(list, pairs) {
  list.replaceChildren(...pairs.map(([name, value]) => element("div", "", element("dt", "", name), element("dd", "", value))));
}

function sparkline(svg, values, top) {
  const length = 120;
  const highest = Math.max(top ?? 0, ...values) || 1;
  const start = length - values.length;
  const points = values.map((value, index) => `${start + index},${(35 - 33 * value / highest).toFixed(2)}`);
  svg.setAttribute("viewBox", `0 0 ${length - 1} 36`);
  svg.setAttribute("preserveAspectRatio", "none");
  const line = document.createElementNS(svg.namespaceURI, "polyline");
  line.setAttribute("points", points.join(" "));
  const area = document.createElementNS(svg.namespaceURI, "path");
  if (points.length) area.setAttribute("d", `M${start},36 L${points.join(" L")} L${length - 1},36 Z`);
  svg.replaceChildren(area, line);
}

// The parts of the page, top to bottom

function drawHead(status) {
  const { info, problem } = status;
  $("ready").textContent = problem ?? "ready";
  $("ready").className = `pill ${problem ? "bad" : "good"}`;
  $("model").textContent = status.model;
  const facts = [`version ${status.version}`, `up ${duration(status.uptime_s)}`];
  if (info) facts.push(info.isa, `${info.threads} threads`, `context ${count(info.max_model_len)}`);
  $("facts").textContent = `· ${facts.join(" · ")}`;
}

function drawTiles({ info, engine, ticks, connections }) {
  const last = ticks.at(-1);
  $("generation").textContent = count(last?.generation_tokens_per_s);
  $("prefill").textContent = last ? `+ ${count(last.prefill_tokens_per_s)} prefill` : "";
  $("running").textContent = count(engine?.running);
  $("running-note").textContent = `${count(connections)} ${connections === 1 ? "connection" : "connections"}`;
  $("waiting").textContent = count(engine?.waiting);
  const reasons = Object.entries(engine?.waiting_by_reason ?? {}).filter(([, waiting]) => waiting);
  $("waiting-note").textContent = reasons.map(([reason, waiting]) => `${count(waiting)} for ${reason}`).join(", ");
  $("usage").textContent = engine && engine.pages_total ? percent(engine.pages_owned / engine.pages_total) : "–";
  $("usage-note").textContent = engine && info ? `${count(engine.pages_owned * info.page_size)} tokens` : "";
  sparkline($("generation-line"), ticks.map((tick) => tick.generation_tokens_per_s));
  sparkline($("running-line"), ticks.map((tick) => tick.running), 4);
  sparkline($("waiting-line"), ticks.map((tick) => tick.waiting), 4);
  sparkline($("usage-line"), ticks.map((tick) => tick.kv_cache_usage), 1);
}

function drawLatencies({ latencies }) {
  const named = [
    ["first token", latencies.time_to_first_token],
    ["between tokens", latencies.inter_token],
    ["whole request", latencies.e2e],
    ["engine step", latencies.step],
  ];
  rows($("latencies"), 5, named.map(([name, { p50, p90, p99, count: total }]) =>
    element("tr", "", cell("", name), ...[p50, p90, p99].map((value) => cell("", duration(value))), cell("", count(total)))));
}

function drawPool({ engine, info }) {
  if (!engine) {
    $("pages").replaceChildren();
    legend($("pages-legend"), []);
    $("pool-note").textContent = "the engine does not answer";
    $("cache-note").textContent = "";
    return;
  }
  const reservedFree = Math.min(engine.pages_reserved, engine.pages_free);
  const pinned = Math.min(engine.pages_pinned, engine.pages_cached);
  const kinds = [
    ["owned", engine.pages_owned],
    ["pinned", pinned],
    ["cached", engine.pages_cached - pinned],
    ["reserved", reservedFree],
    ["free", engine.pages_free - reservedFree],
  ];
  const perCell = Math.max(1, Math.ceil(engine.pages_total / MAX_CELLS));
  drawCells($("pages"), kinds, perCell);
  legend($("pages-legend"), kinds.map(([kind, pages]) => [kind, kind, count(pages)]));
  const facts = [`${count(engine.pages_total)} pages`];
  if (info) facts.push(`of ${info.page_size} tokens`);
  $("pool-note").textContent = facts.join(" ") + (perCell > 1 ? `, ${perCell} per square` : "");
  const asked = engine.prefix_queries_tokens;
  const found = asked ? percent(engine.prefix_hits_tokens / asked) : "none yet";
  $("cache-note").textContent =
    `Prompt tokens found in the prefix cache: ${found}.` +
    (engine.states_total
      ? ` ${count(engine.states_cached)} states are kept, of ${count(engine.states_cached_bytes)} bytes;` +
        ` ${count(engine.stateless_tokens)} tokens were computed again for lack of a state.`
      : "") +
    (engine.pages_spilled ? ` ${count(engine.pages_spilled)} pages are in the spill file.` : "");
}

function drawCells(grid, kinds, perCell) {
  // A cell stands for perCell pages. A state with any page has at least one cell.
  const classes = kinds.flatMap(([kind, pages]) => Array(pages ? Math.max(1, Math.round(pages / perCell)) : 0).fill(kind));
  while (grid.childElementCount > classes.length) grid.lastElementChild.remove();
  while (grid.childElementCount < classes.length) grid.append(element("i"));
  classes.forEach((kind, index) => {
    if (grid.children[index].className !== kind) grid.children[index].className = kind;
  });
}

function drawOutcomes({ outcomes }) {
  const pairs = Object.entries(outcomes).flatMap(([how, byName]) =>
    Object.entries(byName).map(([name, total]) => [`${how}: ${name}`, count(total)]));
  counts($("outcomes"), pairs.length ? pairs : [["none yet", ""]]);
}

function drawEngine({ info, engine, batch_size }) {
  const pairs = [];
  $("threads-note").textContent = info ? `${info.threads} threads: ${info.threads_reason}` : "";
  if (info) pairs.push(["engine processes", info.num_processes ? count(info.num_processes) : "in the server process"]);
  if (engine) {
    pairs.push(
      ["restarts", count(engine.restarts)],
      ["replayed requests", count(engine.replayed_requests)],
      ["quarantined requests", count(engine.quarantined_requests)],
      ["steps", count(engine.step)],
      ["sequences per step", batch_size === null ? "–" : batch_size.toFixed(1)],
      ["preemptions", count(engine.preemptions)],
      ["recomputed tokens", count(engine.recomputed_tokens)],
    );
    if (engine.steps_over_itl_target) pairs.push(["steps over the latency target", count(engine.steps_over_itl_target)]);
    if (engine.draft_tokens) pairs.push(["draft tokens accepted", percent(engine.accepted_draft_tokens / engine.draft_tokens)]);
  }
  counts($("engine"), pairs.length ? pairs : [["the engine does not answer", ""]]);
}

function drawFleet({ fleet }) {
  $("fleet").hidden = !fleet;
  if (!fleet) return;
  const load = ({ engine }) => (engine ? engine.running + engine.waiting : 0);
  const most = Math.max(1, ...fleet.hosts.map(load));
  const states = Object.entries(fleet.num_hosts).map(([state, hosts]) => `${count(hosts)} ${state}`);
  $("hosts-note").textContent = [...states, `${count(fleet.moved_requests)} requests moved`].join(", ");
  const classes = Object.entries(fleet.bits).filter(([bits]) => bits).map(([bits, hosts]) => `${bits} (${count(hosts)})`);
  $("bits-note").textContent = classes.length ? `Bits ids: ${classes.join(", ")}.` : "";
  rows($("hosts"), 10, fleet.hosts.map((host) => {
    const { engine } = host;
    const line = element("div", "bar-line", bar(engine ? [["decode", engine.running / most], ["queue", engine.waiting / most]] : []));
    line.append(element("small", "", engine ? `${count(engine.running)} + ${count(engine.waiting)}` : "–"));
    const state = cell(host.state === "up" ? "" : "bad-word", host.state);
    state.title = host.problem ?? "";
    const asked = engine?.prefix_queries_tokens;
    return element("tr", "", cell("", host.address), state, cell("grow", line), cell("right wide", count(host.requests)),
      cell("right wide", duration(engine ? host.predicted_wait_s : null)),
      cell("right", engine?.pages_total ? percent(engine.pages_owned / engine.pages_total) : "–"),
      cell("right", asked ? percent(engine.prefix_hits_tokens / asked) : "–"),
      cell("right wide", count(host.moved_requests)), cell("right wide", count(engine?.replayed_requests)),
      cell("wide", host.bits.slice(0, 8) || "–"));
  }), "there is no engine host");
}

const tenantCell = (tenant) => {
  const made = cell(tenant ? "name" : "name empty", tenant || "–");
  made.title = tenant;
  return made;
};

function drawRequests({ requests, engine }) {
  const live = engine ? engine.running + engine.waiting : requests.length;
  $("requests-note").textContent = requests.length ? `${count(Math.max(live, requests.length))}, oldest first` : "";
  rows($("requests"), 6, requests.map((request) => {
    const { prompt_tokens: all, prefilled: done } = request;
    const known = all !== null && done !== null;
    const share = known && all ? Math.min(1, done / all) : 0;
    const line = element("div", "bar-line", bar([[share < 1 ? "prefill" : "prefilled", share]]));
    line.append(element("small", "", share > 0 && share < 1 ? `${count(done)} of ${count(all)}` : count(all)));
    return element("tr", "", tenantCell(request.tenant), cell("wide", request.request_id),
      cell("", element("span", `state ${request.state}`, request.state)), cell("grow", line),
      cell("right", count(request.generated)), cell("right", duration(request.age_s)));
  }), "no live requests");
}

function drawRecent({ recent }) {
  legend($("phases-legend"), [...PHASES.map((phase) => [phase, phase]), ["rest", "other"]]);
  const longest = Math.max(1, ...recent.map((request) => request.e2e_ms));
  rows($("recent"), 9, recent.map((request) => {
    const spent = PHASES.map((phase) => [phase, request[`${phase}_ms`]]);
    const rest = Math.max(0, request.e2e_ms - spent.reduce((sum, [, ms]) => sum + ms, 0));
    const made = bar([...spent, ["rest", rest]].map(([phase, ms]) => [phase, ms / longest]));
    made.title = spent.map(([phase, ms]) => `${phase} ${duration(ms / 1000)}`).join(", ");
    const first = request.time_to_first_token_ms;
    return element("tr", "", tenantCell(request.tenant), cell(request.ok ? "" : "bad-word", request.outcome),
      cell("grow", made), cell("right", duration(request.e2e_ms / 1000)),
      cell("right wide", duration(first === null ? null : first / 1000)), cell("right wide", count(request.prompt_tokens)),
      cell("right wide", count(request.cached_tokens)), cell("right wide", count(request.generated)),
      cell("right wide", duration(request.ended_s_ago)));
  }), "none yet");
}

const PARTS = [drawHead, drawTiles, drawLatencies, drawPool, drawOutcomes, drawEngine, drawFleet, drawRequests, drawRecent];

async function update() {
  try {
    const answer = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error(`status.json: ${answer.status}`);
    const status = await answer.json();
    for (const draw of PARTS) draw(status);
    document.body.classList.remove("stale");
  } catch (error) {
    $("ready").textContent = `no answer (${error.message})`;
    $("ready").className = "pill bad";
    document.body.classList.add("stale");
  }
}

let next;

async function run() {
  clearTimeout(next);
  if (document.hidden) return;
  await update();
  clearTimeout(next);
  if (!document.hidden) next = setTimeout(run, PERIOD_MS);
}

document.addEventListener("visibilitychange", run);
run();
