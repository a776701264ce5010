"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const S = data.strings;
const $ = (id) => document.getElementById(id);

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

const executors = Object.keys(data.executors);
const colour = (name) => `var(--e${Math.min(Math.max(executors.indexOf(name), 0), 5)})`;
const bytes = (count) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  for (; count >= 1000 && power < 4; power++) count /= 1000;
  return `${count.toFixed(Math.min(power, 1))} ${units[power]}`;
};
const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

// Calls, each with its fold: which layers are alike, and which of their calls it is.
const parts = data.parts.map((part, number) => {
  const calls = part.calls.map(([module, operation, result, executor, source, declined, region, held], at) => ({
    part: number, at, module: S[module], operation: S[operation], result: S[result], executor: S[executor],
    source: S[source], declined, region: S[region], held,
  }));
  const folds = [];
  let at = 0, shown = 0;
  for (const [layers, length] of part.folds) {
    const fold = { layers, length, start: at, modules: part.modules.slice(shown, shown + length).map((m) => S[m]) };
    for (let k = 0; k < layers * length; k++, at++) Object.assign(calls[at], { fold, k: k % length, layer: Math.floor(k / length) });
    shown += length;
    folds.push(fold);
  }
  const title = (data.graphs > 1 ? `graph ${part.graph}, ` : "") + part.phase;
  return { ...part, calls, folds, title };
});
for (const part of parts) for (const call of part.calls) {
  const reasons = call.declined.flatMap((id) => data.declined[id]);
  const inside = call.held.flatMap((row) => row.map((id) => S[id]));
  call.text = [call.module, call.operation, call.result, call.executor, call.source, ...reasons, ...inside].join("\n").toLowerCase();
}

function overview() {
  $("name").textContent = data.name;
  $("summary").textContent = data.summary.startsWith(data.name + ": ") ? data.summary.slice(data.name.length + 2) : data.summary;
  const count = (title) => (data.reasons.find((each) => each[0] === title) || [0, []])[1].reduce((sum, [, times]) => sum + times, 0);
  const seconds = Object.values(data.seconds).reduce((a, b) => a + b, 0);
  const tiles = [
    ["graphs", data.graphs], ["operations", data.operations], ["fusions", data.fusions],
    ["opaque calls", count("opaque calls"), true], ["graph breaks", count("graph breaks"), true],
    ["recompiles", count("recompiles"), true], ["run in eager", count("run in eager"), true],
    ["kept for backward", bytes(data.saved_bytes)], ["to compile", `${seconds.toFixed(1)} s`],
  ];
  $("tiles").append(...tiles.map(([name, value, bad]) => el("div", { class: bad && value ? "tile bad" : "tile" }, el("b", {}, String(value)), el("span", {}, name))));
  if (!executors.length) return;
  $("share").append(
    el("div", { class: "stack", role: "img", "aria-label": "operations by executor" }, ...executors.map((name) => el("i", { style: `flex:${data.executors[name]};background:${colour(name)}` }))),
    el("div", { class: "legend" }, ...executors.map((name) => el("span", {}, el("i", { class: "dot", style: `background:${colour(name)}` }), `${name}: ${counted(data.executors[name], "operation")}, ${Math.round(100 * data.executors[name] / data.operations)} %`))),
  );
}

function options(select, all, values) {
  select.replaceChildren(el("option", { value: "" }, all), ...values.map(([value, shown]) => el("option", { value }, shown)));
}

const starred = (module) => module.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");
const opened = new Set();

function filters() {
  options($("executor"), "all", executors.map((name) => [name, name]));
  options($("phase"), "all", parts.map((part, number) => [String(number), part.title]));
  const modules = new Set();
  for (const part of parts) for (const call of part.calls) {
    const names = starred(call.module).split(".");
    if (call.module) for (let end = 1; end <= names.length; end++) modules.add(names.slice(0, end).join("."));
  }
  options($("module"), "all", [...modules].sort().map((name) => [name, name]));
  $("search").addEventListener("input", table);
  for (const id of ["executor", "phase", "module", "unfold"]) $(id).addEventListener("change", table);
  $("filters").addEventListener("submit", (event) => event.preventDefault());
}

function matching() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const [executor, phase, module] = ["executor", "phase", "module"].map((id) => $(id).value);
  return (call) => (!executor || call.executor === executor) && (!phase || call.part === Number(phase))
    && (!module || (starred(call.module) + ".").startsWith(module + "."))
    && words.every((word) => call.text.includes(word));
}

function table() {
  const matches = matching(), body = [];
  let shown = 0, total = 0;
  for (const part of parts) {
    const rows = [];
    for (const fold of part.folds) {
      const calls = part.calls.slice(fold.start, fold.start + fold.layers * fold.length);
      const found = calls.filter(matches);
      total += calls.length;
      shown += found.length;
      if (!found.length) continue;
      const key = `${part.title} ${fold.start}`;
      const complete = found.every((call) => found.length % fold.layers === 0 && matches(calls[call.k]))
        && found.length === fold.layers * found.filter((call) => call.layer === 0).length;
      if (fold.layers > 1) rows.push(foldRow(fold, key, complete));
      if (fold.layers > 1 && complete && !opened.has(key) && !$("unfold").checked) {
        for (const call of found.filter((each) => each.layer === 0)) rows.push(...row(call, fold.modules[call.k], true));
      } else for (const call of found) rows.push(...row(call, call.module, false));
    }
    if (rows.length) body.push(el("tr", { class: "part" }, el("td", { colspan: 6 }, part.title)), ...rows);
  }
  $("shown").textContent = shown === total ? `${counted(total, "call")}, fusions as one each` : `${shown} of ${counted(total, "call")} shown`;
  $("table").tBodies[0].replaceChildren(...body);
}

function foldRow(fold, key, complete) {
  const isOpen = opened.has(key);
  const toggle = () => {
    if (isOpen) opened.delete(key); else opened.add(key);
    table();
    const again = [...document.querySelectorAll(".unfold")].find((each) => each.dataset.key === key);
    if (again) again.focus();
  };
  const said = `${fold.layers} layers that are alike, ${counted(fold.length, "call")} each `;
  const button = complete ? el("button", { type: "button", class: "small unfold", "data-key": key, "aria-expanded": String(isOpen), onclick: toggle }, isOpen ? "show once" : "show every layer") : null;
  return el("tr", { class: "fold" }, el("td", { colspan: 6 }, said, button));
}

function row(call, module, folded) {
  const who = el("span", { class: "pill", style: `color:${colour(call.executor)}` }, call.executor);
  const names = [...new Set(call.declined.map((id) => data.declined[id][0]))].join(", ");
  const line = el("tr", { class: folded ? "call folded" : "call" });
  const button = el("button", { type: "button", class: "open", "aria-expanded": "false" }, call.operation);
  button.addEventListener("click", () => {
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!isOpen));
    if (isOpen) line.nextSibling.remove(); else line.after(detail(call));
  });
  const has = call.held.length || call.declined.length;
  line.append(el("td", { class: "code" }, module), el("td", { class: "code" }, has ? button : call.operation), el("td", { class: "code" }, call.result), el("td", {}, who), el("td", {}, names), el("td", { class: "code" }, call.source));
  return [line];
}

function detail(call) {
  const cell = el("td", { colspan: 6 });
  for (const id of call.declined) cell.append(el("div", {}, el("b", {}, data.declined[id][0]), ` declined: ${data.declined[id][1]}`));
  if (call.held.length) {
    cell.append(el("table", { "aria-label": `what ${call.region} holds` }, el("tbody", {}, ...call.held.map(([operation, result, module, source]) =>
      el("tr", {}, ...[module, operation, result, source].map((id) => el("td", { class: "code" }, S[id])))))));
  }
  return el("tr", { class: "detail" }, cell);
}

function declines() {
  const place = document.querySelector("#declines div"), counts = new Map();
  for (const part of parts) for (const call of part.calls) for (const id of call.declined) {
    const found = counts.get(id) || new Map();
    const name = call.region ? "fusions" : call.operation;
    counts.set(id, found.set(name, (found.get(name) || 0) + 1));
  }
  if (!counts.size) return place.append(el("p", { class: "hint" }, "Nobody declined a call: the first that was asked took it."));
  place.append(...[...counts].map(([id, names]) => el("div", { class: "reason" }, el("b", {}, data.declined[id][0]), ` ${data.declined[id][1]}`,
    el("p", {}, [...names].map(([name, times]) => times > 1 ? `${name} ×${times}` : name).join(", ")))));
}

function bars(place, rows, shown) {
  const most = Math.max(...rows.map((each) => each[1]), 1e-12);
  place.append(...rows.map(([name, value, said]) => el("div", { class: "bar" }, el("span", { title: said || null }, name), el("i", { style: `width:${Math.max(100 * value / most, 0.5)}%` }), el("span", {}, shown(value)))));
  if (!rows.length) place.append(el("p", { class: "hint" }, "none"));
}

function source() {
  const found = new Map();
  for (const part of parts) for (const call of part.calls) {
    const rows = call.held.length ? call.held.map((each) => S[each[3]]) : [call.source];
    for (const line of rows) if (line) {
      const counts = found.get(line) || new Map();
      found.set(line, counts.set(call.executor, (counts.get(call.executor) || 0) + 1));
    }
  }
  const split = (line) => line.match(/^(.*?):(\d+)(.*)$/s) || [line, line, 0, ""];
  const lines = [...found.keys()].sort((a, b) => { const x = split(a), y = split(b); return x[1].localeCompare(y[1]) || x[2] - y[2]; });
  $("lines").tBodies[0].append(...lines.map((line) => {
    const counts = [...found.get(line)];
    const go = () => { $("search").value = line.split("  ")[0]; table(); $("operations").scrollIntoView(); $("search").focus(); };
    const [, file, number, code] = split(line);
    return el("tr", {}, el("td", { class: "code" }, el("button", { type: "button", class: "small", title: "show its operations", onclick: go }, `${file}:${number}`), ` ${code.trim()}`),
      el("td", {}, String(counts.reduce((sum, each) => sum + each[1], 0))),
      el("td", {}, ...counts.map(([name, times]) => el("span", { class: "pill", style: `color:${colour(name)};margin-right:6px` }, `${name} ${times}`))));
  }));
}

// The drawing: calls in rows, each below all that it reads.
function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const WIDE = 216, HIGH = 40, GAP = 24, DOWN = 34;

function drawing(part) {
  const node = (at) => part.calls[at].fold.start + part.calls[at].k;
  const begin = new Map(part.folds.map((fold) => [fold, Math.min(...part.order.slice(fold.start, fold.start + fold.length))]));
  const when = (at) => part.calls[at].fold.layers > 1 ? begin.get(part.calls[at].fold) : part.order[at];  // what repeats stands together
  const nodes = [...new Set(part.calls.map((call) => node(call.at)))].sort((a, b) => when(a) - when(b) || part.order[a] - part.order[b]);
  const turn = new Map(nodes.map((at, number) => [at, number]));
  const straight = new Set(), next = new Set();
  for (const [from, to] of part.edges) {
    const a = node(from), b = node(to), one = part.calls[from], other = part.calls[to];
    if (one.fold === other.fold && one.layer !== other.layer) next.add(`${a} ${b}`); else straight.add(`${a} ${b}`);
  }
  const pairs = (set) => [...set].map((each) => each.split(" ").map(Number));
  const reads = new Map(nodes.map((each) => [each, []])), level = new Map(), rows = [];
  for (const [a, b] of pairs(straight)) if (turn.get(a) < turn.get(b)) reads.get(b).push(a);
  let floor = 0;
  let lowest = 0, fold = null;
  const frames = [];
  for (const at of nodes) {
    const of = part.calls[at].fold;
    if (of !== fold && (of.layers > 1 || (fold && fold.layers > 1))) floor = lowest;  // what repeats stands apart
    fold = of;
    const here = Math.max(floor, ...reads.get(at).map((each) => level.get(each) + 1));
    level.set(at, here);
    lowest = Math.max(lowest, here + 1);
    (rows[here] = rows[here] || []).push(at);
    if (of.layers > 1) {
      const frame = frames.find((each) => each.fold === of);
      if (frame) { frame.end = Math.max(frame.end, here); frame.start = Math.min(frame.start, here); } else frames.push({ fold: of, start: here, end: here });
    }
  }
  const place = new Map(), most = Math.max(...rows.map((row) => row.length));
  const width = Math.max(most * (WIDE + GAP) + 90, 480), centre = (width - 60) / 2;
  rows.forEach((row, y) => {
    const wish = (at) => reads.get(at).length ? reads.get(at).reduce((sum, each) => sum + place.get(each)[0], 0) / reads.get(at).length : centre;
    row.sort((a, b) => wish(a) - wish(b) || turn.get(a) - turn.get(b));
    row.forEach((at, x) => place.set(at, [centre + (x - (row.length - 1) / 2) * (WIDE + GAP), y * (HIGH + DOWN) + 26]));
  });
  const height = rows.length * (HIGH + DOWN) + 16;
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `What feeds what, ${part.title}` });
  for (const { fold, start, end } of frames) root.append(
    svg("rect", { class: "frame", x: 4, y: start * (HIGH + DOWN) + 10, width: width - 8, height: (end - start + 1) * (HIGH + DOWN) - 6, rx: 10 }),
    svg("text", { class: "sub", x: 12, y: start * (HIGH + DOWN) + 24 }, `×${fold.layers}`));
  const lines = [];
  const draw = (a, b, path, kind) => { const line = svg("path", { d: path, class: kind }); lines.push([a, b, line]); root.append(line); };
  for (const [a, b] of pairs(straight)) {
    const [x, y] = place.get(a), [u, v] = place.get(b), top = y + HIGH, far = v - top > HIGH + DOWN ? (u >= x ? 1 : -1) * (WIDE / 2 + 10) : 0;
    draw(a, b, `M${x} ${top}C${x + far} ${top + DOWN * 0.8},${u + far} ${v - DOWN * 0.8},${u} ${v}`, "");
  }
  for (const [a, b] of pairs(next)) {
    const [x, y] = place.get(a), [u, v] = place.get(b), side = width - 24;
    draw(a, b, `M${x + WIDE / 2} ${y + HIGH / 2}C${side} ${y + HIGH / 2},${side} ${v + HIGH / 2},${u + WIDE / 2} ${v + HIGH / 2}`, "next");
  }
  const boxes = nodes.map((at) => {
    const call = part.calls[at], [x, y] = place.get(at), module = call.fold.modules[call.k];
    const short = (said, length) => said.length > length ? said.slice(0, length - 1) + "…" : said;
    const tail = (said, length) => said.length > length ? "…" + said.slice(1 - length) : said;
    const label = call.region ? `${call.region.split(".").pop()} (${call.held.length})` : call.operation.replace(/^torch\.(nn\.functional\.|Tensor\.)?/, "");
    const box = svg("g", { class: "box", tabindex: 0, role: "img", "aria-label": `${call.operation}, ${call.executor}, ${module}` },
      svg("rect", { x: x - WIDE / 2, y, width: WIDE, height: HIGH, rx: 7, style: `stroke:${colour(call.executor)}` }),
      svg("text", { x: x - WIDE / 2 + 10, y: y + 17 }, short(label, 27)), svg("text", { class: "sub", x: x - WIDE / 2 + 10, y: y + 32 }, tail(module || call.executor, 31)),
      svg("title", {}, `${call.operation}\n${module}\n${call.result}\n${call.executor}`));
    const show = (on) => () => {
      root.classList.toggle("some", on);
      for (const [a, b, line] of lines) {
        const near = on && (a === at || b === at);
        line.classList.toggle("on", near);
        if (near || !on) for (const each of [a, b]) boxOf.get(each).classList.toggle("on", near);
      }
      box.classList.toggle("on", on);
    };
    for (const [event, on] of [["mouseenter", true], ["mouseleave", false], ["focus", true], ["blur", false]]) box.addEventListener(event, show(on));
    return [at, box];
  });
  const boxOf = new Map(boxes);
  root.append(...boxOf.values());
  return root;
}

function graphs() {
  const drawn = parts.filter((part) => part.edges && part.calls.length);
  if (!drawn.length) return $("graphs").append(el("p", { class: "hint" }, "No program is there to be drawn."));
  const place = el("div", { class: "drawing", tabindex: 0, role: "region", "aria-label": "Drawing" });
  const buttons = drawn.map((part) => el("button", { type: "button", class: "small", onclick: () => choose(part) }, part.title));
  const choose = (part) => {
    buttons.forEach((button, number) => button.setAttribute("aria-pressed", String(drawn[number] === part)));
    place.replaceChildren(drawing(part));
    place.scrollLeft = Math.max(0, (place.firstChild.width.baseVal.value - place.clientWidth) / 2);
  };
  const tools = el("div", { role: "group", "aria-label": "Program to draw", style: "display:flex;gap:6px;flex-wrap:wrap" }, ...buttons);
  $("graphs").append(tools, place);
  choose(drawn[0]);
}

// Stages: lines of one pool, by number.
const stages = data.stages;
const spread = (runs) => runs.flatMap(([first, count]) => Array.from({ length: count }, (_, k) => first + k));

// What changed between two lists of numbers: [" ", n], ["-", n], ["+", n]. Lines that each has once are what they agree on.
function difference(a, b) {
  const out = [];
  let start = 0, end = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) out.push([" ", a[start++]]);
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const one = a.slice(start, a.length - end), other = b.slice(start, b.length - end);
  const anchors = one.length && other.length ? common(one, other) : [];
  let i = 0, j = 0;
  for (const [x, y] of anchors) {
    out.push(...difference(one.slice(i, x), other.slice(j, y)), [" ", one[x]]);
    [i, j] = [x + 1, y + 1];
  }
  if (anchors.length) out.push(...difference(one.slice(i), other.slice(j)));
  else out.push(...one.map((n) => ["-", n]), ...other.map((n) => ["+", n]));
  for (let k = a.length - end; k < a.length; k++) out.push([" ", a[k]]);
  return out;
}

function common(a, b) {
  const places = (list) => { const found = new Map(); list.forEach((n, at) => found.set(n, found.has(n) ? -1 : at)); return found; };
  const left = places(a), right = places(b), piles = [];
  for (const [n, x] of left) {
    const y = right.get(n);
    if (x < 0 || y === undefined || y < 0) continue;
    let low = 0, high = piles.length;
    while (low < high) { const middle = (low + high) >> 1; if (piles[middle].y < y) low = middle + 1; else high = middle; }
    piles[low] = { x, y, before: low ? piles[low - 1] : null };
  }
  const chain = [];
  for (let each = piles[piles.length - 1]; each; each = each.before) chain.push([each.x, each.y]);
  return chain.reverse();
}

let current = 0;

function traces() {
  const section = $("traces");
  if (!stages || !stages.parts.length) {
    for (const id of ["trace-tools", "stages", "code"]) $(id).remove();
    $("stage-note").textContent = stages ? "No program is there any more: Dynamo dropped it, or nothing was compiled." : "explain(…).to_html(path) has every stage.";
    return;
  }
  $("program").append(...stages.parts.map((part, number) => el("option", { value: number }, (data.graphs > 1 ? `graph ${part.graph}, ` : "") + part.phase)));
  $("program").addEventListener("change", program);
  $("compare").addEventListener("change", code);
  $("find").addEventListener("input", code);
  program();
}

function program() {
  const part = stages.parts[$("program").value];
  current = part.stages.length - 1;
  $("stages").replaceChildren(...part.stages.map(([name], number) => el("button", { type: "button", class: "small", onclick: () => { current = number; code(); } }, name)));
  options($("compare"), "nothing", part.stages.map(([name], number) => [String(number), `${number + 1}. ${name}`]));
  code();
}

function code() {
  const part = stages.parts[$("program").value], find = $("find").value.toLowerCase();
  [...$("stages").children].forEach((button, number) => button.setAttribute("aria-pressed", String(number === current)));
  const numbers = spread(part.stages[current][1]), with_ = $("compare").value;
  const said = [];
  let lines = numbers.map((n) => [" ", n]);
  if (with_ !== "") {
    lines = difference(spread(part.stages[Number(with_)][1]), numbers);
    const [less, more] = ["-", "+"].map((sign) => lines.filter((each) => each[0] === sign).length);
    said.push(`from “${part.stages[Number(with_)][0]}” to “${part.stages[current][0]}”: ${counted(less, "line")} less, ${more} more`);
    lines = near(lines);
  }
  let found = 0;
  $("code").replaceChildren(...lines.map(([sign, n]) => {
    if (sign === "…") return el("div", { class: "skipped" }, `    … ${counted(n, "line")} alike`);
    const line = el("div", { class: { "+": "add", "-": "remove", " ": "" }[sign] });
    const text = stages.lines[n];
    if (with_ !== "") line.append(`${sign} `);
    if (find && text.toLowerCase().includes(find)) {
      found++;
      for (let at = 0; ;) {
        const hit = text.toLowerCase().indexOf(find, at);
        if (hit < 0) { line.append(text.slice(at)); break; }
        line.append(text.slice(at, hit), el("mark", {}, text.slice(hit, hit + find.length)));
        at = hit + find.length;
      }
    } else {
      const comment = text.search(/(^\s*#|  # )/);
      if (comment < 0) line.append(text || "\u00a0");
      else line.append(text.slice(0, comment), el("span", { class: "comment" }, text.slice(comment)));
    }
    return line;
  }));
  if (find) said.push(`${counted(found, "line")} with “${find}”`);
  if (data.shortened) said.push("of this large program the last stage alone is kept; FORGE_KEEP_STAGES=1 keeps all");
  if (stages.left) said.push(`${counted(stages.left, "stage")} left out, since the page would be too large`);
  $("stage-note").textContent = said.join(" · ") || counted(numbers.length, "line");
  const first = find && $("code").querySelector("mark");
  if (first) $("code").scrollTop = first.parentNode.offsetTop - $("code").offsetTop - 60;
}

// The lines that changed, with three on either side.
function near(lines) {
  const keep = new Uint8Array(lines.length);
  lines.forEach(([sign], at) => { if (sign !== " ") keep.fill(1, Math.max(0, at - 3), at + 4); });
  const out = [];
  lines.forEach((line, at) => {
    if (keep[at]) out.push(line);
    else if (out.length && out[out.length - 1][0] === "…") out[out.length - 1][1]++;
    else out.push(["…", 1]);
  });
  return out;
}

function happened() {
  const place = document.querySelector("#happened div");
  for (const [title, reasons] of data.reasons) place.append(el("h3", {}, title), el("ul", {}, ...reasons.map(([reason, times]) => el("li", {}, times > 1 ? `${reason} (×${times})` : reason))));
  if (!data.reasons.length) place.append(el("p", { class: "hint" }, "No graph breaks, no recompiles, nothing in eager, no opaque calls."));
}

overview();
filters();
table();
declines();
graphs();
const inSeconds = (value) => value < 1e-3 ? `${(value * 1e6).toFixed(1)} µs` : value < 0.1 ? `${(value * 1e3).toFixed(1)} ms` : `${value.toFixed(2)} s`;
bars($("seconds"), Object.entries(data.seconds).sort((a, b) => b[1] - a[1]), inSeconds);
if (data.costs) {
  $("measured").hidden = false;
  $("unmeasured").hidden = true;
  const named = ([name, , , count]) => count > 1 ? `${name} (×${count})` : name;
  const timed = (rows) => rows.map((each) => [named(each), each[1], counted(each[3], "call")]);
  bars($("run-operations"), timed(data.costs.operations), inSeconds);
  bars($("run-executors"), timed(data.costs.executors), inSeconds);
  const held = data.costs.operations.filter((each) => each[2]).sort((a, b) => b[2] - a[2]);
  bars($("run-memory"), held.map((each) => [named(each), each[2], counted(each[3], "call")]), bytes);
}
bars($("saved"), data.saved.map(([module, count, size]) => [`${module} (${count})`, size, counted(count, "tensor")]), bytes);
source();
traces();
happened();
$("sections").append(...[...document.querySelectorAll("main section h2")].map((title) => el("a", { href: `#${title.parentNode.id}` }, title.textContent)));
document.documentElement.dataset.ready = "yes";
