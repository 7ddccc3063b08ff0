"use strict";
// One sample a second arrives as a server-sent event (hybridkv.serve.metrics). The page keeps 30 minutes of samples.
const KEPT_S = 1800;
const NOW_S = 10;
const SLOWEST = 10;
const STATES = { c: "cached", p: "pinned", r: "running" };
const SAID = { c: "cached", p: "pinned", r: "held by requests" };
const WAITS = {
  arrived: "its first step", parent: "the request it is forked from", seats: "a running request to end (--max-running)",
  in_flight: "steps in flight", turn: "its turn", no_space: "memory", fragmented: "contiguous memory",
  admission_limit: "memory for all of its tokens", prefix_not_written: "its prefix to be written",
  prefix_loading: "its prefix to come up from a tier",
};
const at = (id) => document.getElementById(id);
const count = new Intl.NumberFormat("en");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const share = (part) => (part === null ? "-" : `${(100 * part).toFixed(1)}%`);
const seconds = (value) => (value >= 10 ? `${value.toFixed(0)} s` : value >= 1 ? `${value.toFixed(1)} s` : `${(1000 * value).toFixed(value && value < 0.01 ? 1 : 0)} ms`);
const LATENCIES = ["ttft", "tpot"]; // p50 and p99 of the requests that ended in the last 10 s, or null

function bytes(value) {
  const unit = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]].find(([, size]) => value >= size);
  return unit ? `${(value / unit[1]).toFixed(1)} ${unit[0]}` : `${value} B`;
}

// -- history

const seen = []; // the fields of samples that charts and rates need
const marks = []; // { time, preempted, evicted }
const slow = new Map();

function keep(sample) {
  const before = seen.at(-1);
  const gap = before && sample.time - before.time > 5;
  if (gap) seen.push({ time: before.time + 1, gap: true });
  if (before && sample.queries < before.queries) slow.clear(); // the server was restarted
  if (before && !before.gap) {
    const preempted = sample.preemptions - before.preemptions;
    const evicted = sample.evictions - before.evictions;
    if (preempted > 0 || evicted > 0) marks.push({ time: sample.time, preempted, evicted });
  }
  const held = sample.groups.reduce((sum, [, size, held]) => sum + size * held, 0);
  const cached = sample.groups.reduce((sum, [, size, , , evictable]) => sum + size * evictable, 0);
  const { time, queries, hits, output, ttft, tpot, running, waiting, misses, preemptions, evictions } = sample;
  seen.push({ time, queries, hits, output, ttft, tpot, running, waiting, misses, preemptions, evictions, held, cached });
  const oldest = sample.time - KEPT_S;
  while (seen[0].time < oldest) seen.shift();
  while (marks.length && marks[0].time < oldest) marks.shift();
  for (const one of sample.slowest) slow.set(one[0], { at: sample.time - one[1], fields: one });
  const ended = [...slow.values()].filter((one) => one.at >= oldest).sort((a, b) => b.fields[4] - a.fields[4]).slice(0, SLOWEST);
  slow.clear();
  for (const one of ended) slow.set(one.fields[0], one);
}

/** The growth of `name` in the seconds before the sample at `place`, and the number of seconds; null after a gap. */
function grown(place, name, within = NOW_S) {
  const now = seen[place];
  let first = place;
  while (first > 0 && !seen[first - 1].gap && now.time - seen[first - 1].time <= within + 0.5) first -= 1;
  const value = (one) => (typeof name === "function" ? name(one) : one[name]);
  const more = value(now) - value(seen[first]);
  return first === place || more < 0 ? null : { more, seconds: now.time - seen[first].time };
}

function hitNow(place) {
  const asked = grown(place, "queries");
  const found = grown(place, "hits");
  return asked && found && asked.more > 0 ? found.more / asked.more : null;
}

// -- charts

const drawn = {};

const ROUND = [...Array(30).keys()].map((power) => [1, 2, 5][power % 3] * 10 ** Math.floor(power / 3)); // ticks of counts
const BINARY = [...Array(50).keys()].map((power) => 2 ** power); // ticks of bytes

function chart(id, series, { range, format, incrs, tick = format }) {
  const host = at(id);
  host.replaceChildren();
  const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 } };
  const options = {
    width: Math.max(host.clientWidth, 200), height: 190, cursor: { sync: { key: "time" } },
    scales: { x: { time: true }, y: { range: range ?? ((_, least, most) => [0, Math.max(most || 0, 1) * 1.05]) } },
    series: [{}, ...series.map(([label, name]) => ({
      label, stroke: colour(name), width: 2, spanGaps: false, points: { show: false }, value: (_, one) => (one === null || one === undefined ? "-" : format(one)),
    }))],
    axes: [{ ...axis, space: 70 }, { ...axis, size: 74, ...(incrs && { incrs }), values: (_, all) => all.map(tick) }],
    hooks: { draw: [drawMarks] },
  };
  drawn[id] = new uPlot(options, [[], ...series.map(() => [])], host);
}

function drawMarks(plot) {
  const { ctx, bbox } = plot;
  const lines = { preempted: [0, bbox.height], evicted: [bbox.height - 10 * devicePixelRatio, bbox.height] };
  ctx.save();
  ctx.lineWidth = devicePixelRatio;
  for (const mark of marks) {
    const x = plot.valToPos(mark.time, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    for (const [name, [from, to]] of Object.entries(lines)) {
      if (mark[name] <= 0) continue;
      ctx.strokeStyle = colour(name);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top + from);
      ctx.lineTo(x, bbox.top + to);
      ctx.stroke();
    }
  }
  ctx.restore();
}

let reasons = [];

function makeCharts() {
  const palette = ["running", "cached", "pinned", "preempted", "evicted", "queued", "soft", "focus"];
  chart("chart-hits", [["last 10 s", "running"], ["total", "cached"]], { range: [0, 1], format: share, tick: (one) => `${Math.round(100 * one)}%` });
  chart("chart-requests", [["running", "running"], ["waiting", "cached"]], { format: (one) => count.format(one), incrs: ROUND });
  for (const name of LATENCIES) {
    const range = (_, least, most) => [0, (most || 0.001) * 1.05];
    chart(`chart-${name}`, [["p50", "running"], ["p99", "cached"]], { range, format: seconds });
  }
  chart("chart-memory", [["held", "running"], ["held or cached", "cached"]], { format: bytes, incrs: BINARY });
  chart("chart-misses", reasons.map((one, place) => [one.replaceAll("_", " "), palette[place % palette.length]]), {
    format: (one) => `${count.format(Math.round(one))}/s`, incrs: ROUND,
  });
}

function drawCharts() {
  const times = seen.map((one) => one.time);
  const column = (make) => seen.map((one, place) => (one.gap ? null : make(one, place)));
  const data = {
    "chart-hits": [column((_, place) => hitNow(place)), column((one) => (one.queries ? one.hits / one.queries : null))],
    "chart-requests": [column((one) => one.running), column((one) => one.waiting)],
    ...Object.fromEntries(LATENCIES.map((name) => [`chart-${name}`, [0, 1].map((place) => column((one) => one[name]?.[place] ?? null))])),
    "chart-memory": [column((one) => one.held), column((one) => one.held + one.cached)],
    "chart-misses": reasons.map((name) => column((_, place) => {
      const more = grown(place, (one) => one.misses?.[name] ?? 0); // null: a sample from before --explain
      return more && more.more / more.seconds;
    })),
  };
  for (const [id, columns] of Object.entries(data)) drawn[id].setData([times, ...columns]);
}

new ResizeObserver(() => {
  for (const [id, plot] of Object.entries(drawn)) {
    const width = at(id).clientWidth;
    if (width && width !== plot.width) plot.setSize({ width, height: 190 });
  }
  if (latest) drawMap();
}).observe(document.querySelector("main"));

// -- the map of memory

let latest = null;
let chosen = null; // a group, or null for all
let cursor = -1;
let grid = { columns: 1, cell: 1 };

function drawMap() {
  const canvas = at("map");
  const { states, groups, ages } = latest.map;
  const width = canvas.parentElement.clientWidth - 24;
  const cell = Math.max(4, Math.min(28, Math.floor(Math.sqrt((width * Math.min(260, width)) / states.length))));
  const columns = Math.max(1, Math.floor(width / cell));
  const height = Math.ceil(states.length / columns) * cell;
  grid = { columns, cell };
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.scale(devicePixelRatio, devicePixelRatio);
  const fills = { " ": colour("free") };
  for (const [letter, name] of Object.entries(STATES)) fills[letter] = colour(name);
  for (let place = 0; place < states.length; place += 1) {
    const free = states[place] === " ";
    const shown = chosen === null || (!free && parseInt(groups[place], 36) === chosen);
    ctx.globalAlpha = shown ? (free ? 1 : 1 - 0.065 * Number(ages[place])) : 0.1;
    ctx.fillStyle = fills[states[place]];
    ctx.fillRect((place % columns) * cell, Math.floor(place / columns) * cell, cell - 1, cell - 1);
  }
  ctx.globalAlpha = 1;
  if (cursor >= 0) {
    ctx.strokeStyle = colour("text");
    ctx.lineWidth = 2;
    ctx.strokeRect((cursor % columns) * cell, Math.floor(cursor / columns) * cell, cell - 1, cell - 1);
  }
  const counted = Object.entries(SAID).map(([letter, said]) => `${[...states].filter((one) => one === letter).length} ${said}`);
  canvas.setAttribute("aria-label", `Map of memory: of ${states.length} cells ${counted.join(", ")}`);
}

function point(place) {
  const { states, groups, ages } = latest.map;
  cursor = Math.max(0, Math.min(states.length - 1, place));
  const where = `${bytes(Math.floor((cursor * latest.arena) / states.length))} in: `;
  const group = parseInt(groups[cursor], 36);
  at("cell").textContent = states[cursor] === " " ? `${where}free`
    : `${where}${SAID[states[cursor]]}, group ${group} (${latest.groups[group]?.[0]}), for at least ${2 ** Number(ages[cursor]) - 1} s`;
  drawMap();
}

at("map").addEventListener("pointermove", (event) => {
  if (!latest) return;
  const column = Math.min(grid.columns - 1, Math.floor(event.offsetX / grid.cell));
  point(Math.floor(event.offsetY / grid.cell) * grid.columns + column);
});
at("map").addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -grid.columns, ArrowDown: grid.columns }[event.key];
  if (by === undefined || !latest) return;
  event.preventDefault();
  point(cursor < 0 ? 0 : cursor + by);
});

// -- tables and lists: elements are kept, so that focus stays where it is

function element(tag, parent, className) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  parent.append(made);
  return made;
}

function rows(body, wanted, cells, begin) {
  while (body.children.length > wanted.length) body.lastElementChild.remove();
  wanted.forEach((one, place) => {
    let row = body.children[place];
    if (!row) {
      row = element("tr", body);
      for (let cell = 0; cell < cells; cell += 1) element("td", row);
      if (begin) begin(row, place);
    }
  });
  return [...body.children];
}

function fill(id, wanted) {
  rows(at(id).tBodies[0], wanted, wanted[0]?.length ?? 0).forEach((row, place) => {
    wanted[place].forEach((text, cell) => { row.children[cell].textContent = text; });
    row.children[0].title = wanted[place][0];
  });
}

function track(host, parts) {
  parts.forEach(([name, part], place) => {
    const piece = host.children[place] ?? element("span", host);
    piece.className = name;
    piece.style.width = `${Math.max(0, Math.min(100, 100 * part))}%`;
  });
}

function showGroups() {
  const begin = (row, group) => {
    const button = element("button", row.children[0]);
    button.type = "button";
    button.addEventListener("click", () => {
      chosen = chosen === group ? null : group;
      showGroups();
      drawMap();
    });
    element("div", row.children[2], "track");
  };
  rows(at("groups").tBodies[0], latest.groups, 6, begin).forEach((row, group) => {
    const [kind, size, held, cached, evictable, , evictions] = latest.groups[group];
    row.children[0].firstElementChild.textContent = String(group);
    row.children[0].firstElementChild.setAttribute("aria-pressed", String(chosen === group));
    row.children[0].firstElementChild.setAttribute("aria-label", `Group ${group}: show only its blocks`);
    row.children[1].textContent = kind;
    track(row.children[2].firstElementChild, [["running", (held * size) / latest.arena], ["cached", (evictable * size) / latest.arena]]);
    row.children[3].textContent = bytes(held * size);
    row.children[4].textContent = bytes(cached * size);
    row.children[5].textContent = count.format(evictions);
  });
}

function showTiers() {
  at("tiers").hidden = !latest.tiers.length;
  const begin = (row) => element("div", row.children[1], "track");
  rows(at("tier-rows").tBodies[0], latest.tiers, 11, begin).forEach((row, place) => {
    const [name, capacity, kinds, hits, loaded, stored, ...counts] = latest.tiers[place];
    const cached = Object.values(kinds).reduce((sum, size) => sum + size, 0);
    row.children[0].textContent = name;
    track(row.children[1].firstElementChild, Object.entries(kinds).map(([kind, size]) => [kind, size / capacity]));
    [bytes(cached), count.format(hits), bytes(loaded), bytes(stored), ...counts.map((one) => count.format(one))]
      .forEach((text, cell) => { row.children[cell + 2].textContent = text; });
  });
}

function showSlowest() {
  const list = at("slowest");
  const found = [...slow.values()];
  const longest = Math.max(...found.map((one) => one.fields[4]), 1e-9);
  while (list.children.length > found.length) list.lastElementChild.remove();
  found.forEach(({ fields }, place) => {
    const [id, , queued, first, whole, prompt, hit, output, preempted] = fields;
    const item = list.children[place] ?? element("li", list);
    const text = item.children[0] ?? element("span", item);
    const bar = item.children[1] ?? element("div", item, "track");
    const perToken = output > 1 ? `, time per output token ${seconds((whole - first) / (output - 1))}` : "";
    text.textContent = `${id.slice(0, 14)}: ${seconds(whole)}, waited ${seconds(queued)}, time to first token ${seconds(first)}${perToken}; ` +
      `hit tokens ${count.format(hit)} of ${count.format(prompt)}, output tokens ${count.format(output)}${preempted ? `, preemptions ${preempted}` : ""}`;
    track(bar, [["queued", queued / longest], ["prefill", Math.max(first - queued, 0) / longest], ["decode", (whole - first) / longest]]);
  });
}

// -- a sample

function show(sample) {
  latest = sample;
  keep(sample);
  const place = seen.length - 1;
  const names = sample.misses === null ? [] : Object.keys(sample.misses).filter((one) => sample.misses[one] > 0);
  if (names.join() !== reasons.join() || !Object.keys(drawn).length) {
    reasons = names;
    makeCharts();
  }
  at("model").textContent = sample.model;
  document.title = `${sample.model}: ${sample.running} running, ${sample.waiting} waiting`;
  for (const tile of document.querySelectorAll("[data-figure]")) {
    const value = sample[tile.dataset.figure];
    tile.dataset.value = value;
    tile.textContent = count.format(value);
  }
  const waits = Object.entries(sample.waits).filter(([, many]) => many);
  at("why").textContent = waits.length ? waits.map(([why, many]) => `${many} ${why.replaceAll("_", " ")}`).join(", ") : "\u00a0";
  at("hit-now").textContent = share(hitNow(place));
  at("hit-all").textContent = share(sample.queries ? sample.hits / sample.queries : null);
  at("usage").textContent = share(sample.usage);
  at("usage").dataset.value = sample.usage;
  at("held").textContent = `of ${bytes(sample.arena)}`;
  for (const name of LATENCIES) {
    const [half, most] = sample[name] ?? [];
    at(name).textContent = half === undefined ? "-" : seconds(half);
    at(`${name}-p99`).textContent = most === undefined ? "-" : seconds(most);
  }
  const rate = grown(place, "output");
  at("rate").textContent = rate ? count.format(Math.round(rate.more / rate.seconds)) : "-";
  at("unexplained").hidden = sample.misses !== null;
  at("chart-misses").hidden = sample.misses === null;
  drawCharts();
  drawMap();
  showGroups();
  showTiers();
  fill("runs", sample.runs.map(([id, ...counts]) => [id, ...counts.map((one) => count.format(one))]));
  fill("queue", sample.queue.map(([id, tokens, why]) => [id, count.format(tokens), WAITS[why] ?? why]));
  const more = (id, fields, all) => { at(id).textContent = all > fields.length ? `the first ${fields.length} of ${count.format(all)}` : ""; };
  more("runs-more", sample.runs, sample.running);
  more("queue-more", sample.queue, sample.waiting);
  showSlowest();
}

// -- the connection: closed while the page is hidden

let key = "";
let ending = null;

function say(text) {
  if (at("state").textContent !== text) at("state").textContent = text;
}

async function listen() {
  const mine = new AbortController();
  ending = mine;
  try {
    const answer = await fetch("live", { headers: key ? { Authorization: `Bearer ${key}` } : {}, signal: mine.signal });
    if (answer.status === 401 || answer.status === 403) {
      say(key ? "this API key may not see the figures: give an operator's key" : "an API key is needed");
      at("ask").hidden = false;
      return;
    }
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    at("ask").hidden = true;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      const last = parts.at(-1); // a slow page skips to the newest sample
      if (last) {
        show(JSON.parse(last.slice("data: ".length)));
        say("live");
      }
    }
    throw new Error("the server closed the connection");
  } catch (error) {
    if (mine.signal.aborted) return;
    say(`not connected (${error.message}): retrying`);
    setTimeout(() => { if (ending === mine && !document.hidden) listen(); }, 2000);
  }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  ending?.abort();
  listen();
});
document.addEventListener("visibilitychange", () => {
  ending?.abort();
  if (document.hidden) say("paused while hidden");
  else listen();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  if (!latest) return;
  makeCharts();
  drawCharts();
  drawMap();
});
listen();
