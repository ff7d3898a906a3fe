// The view of all runs: a table, curves of those that are ticked, and two of them side by side.

import * as api from "./api.js";
import { draw } from "./chart.js";
import { showComparisons } from "./comparisons.js";
import { $, el, showError, visible } from "./dom.js";

const EVERY_MS = 2000;
const DRAW_MS = 250; // while curves are read
const TICKED = 3; // at first
const NAMED = 16; // below the curves
const COLORS = 8;
const ADDED = 2000; // points, before a curve is read, and thinned, as a whole again

let runs = [];
let ticked = []; // names
let isChosen = false; // by the user
let failed = false;
let timer = null;
let listed = ""; // what the table shows
const rows = new Map(); // of the table, by name
let compared = ""; // what the difference shows
let continued = ""; // whose texts there are
let drawing = null;
const curves = new Map(); // by name: { file, end, train, validation }
const reading = new Map(); // by name: the promise of curves that are being read
const colors = new Map(); // by name, for good
let continuing = null;

const shown = () => !$("runs").hidden && !document.hidden;

export function start() {
  for (const id of ["log-loss", "log-steps", "show-train", "show-validation"]) $(id).addEventListener("change", redraw);
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (paint(), redraw()));
  document.addEventListener("visibilitychange", () => shown() && open());
  $("all-runs").addEventListener("change", () => choose($("all-runs").checked ? runs.map((run) => run.name) : []));
  $("continue").addEventListener("submit", (event) => {
    event.preventDefault();
    continueBoth();
  });
}

/** The view is opened. */
export async function open() {
  clearTimeout(timer);
  await refresh();
  await showComparisons().catch(showError);
}

async function refresh() {
  try {
    runs = await api.get("page/runs");
    showTable();
    const names = runs.map((run) => run.name);
    await tick(isChosen ? ticked.filter((name) => names.includes(name)) : names.slice(0, TICKED));
    if (failed) showError(null);
    failed = false;
  } catch (error) {
    showError(error);
    failed = true;
  }
  clearTimeout(timer);
  if (shown()) timer = setTimeout(refresh, EVERY_MS);
}

function choose(names) {
  isChosen = true;
  tick(names).catch(showError);
}

/** Show the curves of these runs, and of no others. */
async function tick(names) {
  ticked = names;
  paint();
  redraw();
  await Promise.all([showPair(), ...names.map(follow)]);
}

/** Read what a run has added to its metrics, unless that is under way. */
function follow(name) {
  if (!reading.has(name)) reading.set(name, read(name).finally(() => reading.delete(name)));
  return reading.get(name);
}

async function read(name) {
  const { began, changed } = runs.find((run) => run.name === name) ?? {};
  if (!changed) return;
  let known = curves.get(name);
  if (known?.began !== began || known.train[0].length > 2 * known.whole + ADDED)
    known = { file: 0, end: 0, changed: null, train: [[], []], validation: [[], []] };
  let { whole } = known;
  if (known.changed === changed) return;
  for (let complete = false; !complete; ) {
    const address = `page/runs/${encodeURIComponent(name)}?file=${known.file}&start=${known.end}`;
    let found;
    try {
      found = await api.get(address);
    } catch {
      return; // no metrics yet
    }
    const goesOn = found.file === known.file && found.end >= known.end;
    const both = (kind) => (goesOn ? known[kind].map((old, k) => old.concat(found[kind][k])) : found[kind]);
    known = { ...found, train: both("train"), validation: both("validation") };
    complete = found.complete;
  }
  whole ??= known.train[0].length;
  curves.set(name, { ...known, whole, began, changed });
  drawing ??= setTimeout(redraw, DRAW_MS);
}

// -- table --------------------------------------------------------------------------------------

const count = (n) => (n === null ? "–" : n.toLocaleString("en"));

function color(name) {
  if (!colors.has(name)) colors.set(name, colors.size % COLORS);
  return getComputedStyle(document.body).getPropertyValue(`--c${colors.get(name)}`);
}

const swatch = () => el("span", { className: "swatch", "aria-hidden": "true" });

/** Only what is new is changed, so that a screen reader's place in the table is kept. */
function showTable() {
  const now = JSON.stringify(runs);
  if (now === listed) return;
  listed = now;
  const focused = document.activeElement;
  $("no-runs").hidden = runs.length > 0;
  $("with-runs").hidden = !runs.length;
  const body = $("runs-table").tBodies[0];
  const names = new Set(runs.map((run) => run.name));
  for (const [name, row] of rows) {
    if (names.has(name)) continue;
    row.remove();
    rows.delete(name);
  }
  runs.forEach((run, place) => {
    if (!rows.has(run.name)) rows.set(run.name, newRow(run.name));
    const row = rows.get(run.name);
    if (body.rows[place] !== row) body.insertBefore(row, body.rows[place]);
    const cells = [...row.cells].slice(2);
    cells[0].className = run.state;
    [
      run.state,
      run.preset ?? "–",
      count(run.parameters),
      `${count(run.step)} / ${count(run.steps)}`,
      run.best_loss === null ? "–" : run.best_loss.toFixed(4),
      new Date(1000 * run.began).toLocaleString(),
    ].forEach((text, k) => {
      if (cells[k].textContent !== text) cells[k].textContent = text;
    });
  });
  if (focused !== document.activeElement) focused.focus({ preventScroll: true }); // its row was moved
}

function newRow(name) {
  const box = el("input", { type: "checkbox", value: name, "aria-label": `Show ${name}` });
  box.addEventListener("change", () => choose(box.checked ? [...ticked, name] : ticked.filter((other) => other !== name)));
  const cells = Array.from({ length: 6 }, () => el("td"));
  return el("tr", {}, el("td", {}, box, swatch()), el("th", { scope: "row" }, visible(name)), ...cells);
}

/** Mark the runs that are ticked, with the colours of their curves. */
function paint() {
  for (const box of $("runs-table").querySelectorAll("tbody input")) {
    box.checked = ticked.includes(box.value);
    box.nextSibling.style.background = box.checked ? color(box.value) : "";
  }
  $("all-runs").checked = runs.length > 0 && ticked.length === runs.length;
  $("all-runs").indeterminate = ticked.length > 0 && ticked.length < runs.length;
  const more = ticked.length - NAMED;
  $("curve-names").replaceChildren(
    ...ticked.slice(0, NAMED).map((name) => {
      const mark = swatch();
      mark.style.background = color(name);
      return el("span", {}, mark, visible(name));
    }),
    more > 0 ? `and ${more} more` : "",
  );
}

function redraw() {
  clearTimeout(drawing);
  drawing = null;
  if (!shown()) return;
  const some = [];
  for (const name of ticked) {
    const known = curves.get(name);
    if (!known) continue;
    if ($("show-train").checked) some.push({ color: color(name), dashed: false, points: known.train });
    if ($("show-validation").checked) some.push({ color: color(name), dashed: true, points: known.validation });
  }
  const canvas = $("curves");
  canvas.setAttribute("aria-label", `Curves of ${ticked.length} runs: ${ticked.join(", ")}. Their figures are in the table.`);
  canvas.dataset.curves = some.length;
  canvas.hidden = !some.length;
  draw(canvas, some, { logX: $("log-steps").checked, logY: $("log-loss").checked });
}

// -- two runs -----------------------------------------------------------------------------------

async function showPair() {
  const both = ticked;
  if (both.join("\n") !== continued) {
    continuing?.abort();
    $("continued").replaceChildren();
  }
  continued = both.join("\n");
  $("pair").hidden = both.length !== 2;
  $("pair-hint").hidden = both.length === 2;
  // A run that is replaced or resumed may have another config.
  const stamp = ({ name, began, configured }) => [name, began, configured];
  const pair = JSON.stringify(both.map((name) => stamp(runs.find((run) => run.name === name))));
  if (both.length !== 2) compared = "";
  if (both.length !== 2 || pair === compared) return;
  const [a, b] = await Promise.all(both.map((name) => api.get(`page/runs/${encodeURIComponent(name)}/config`)));
  if (both !== ticked || pair === compared) return; // since then
  compared = pair;
  const names = [...new Set([...Object.keys(a), ...Object.keys(b)])];
  const show = (value) => (value === undefined ? "–" : visible(JSON.stringify(value)));
  const different = names.filter((name) => show(a[name]) !== show(b[name]));
  const table = $("difference");
  $("same").hidden = different.length > 0;
  table.hidden = !different.length;
  table.tHead.replaceChildren(
    el("tr", {}, el("th", { scope: "col" }, "option"), ...both.map((name) => el("th", { scope: "col" }, visible(name)))),
  );
  table.tBodies[0].replaceChildren(
    ...different.map((name) =>
      el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, show(a[name])), el("td", {}, show(b[name]))),
    ),
  );
}

/** The same prompt and seed, continued by both. */
async function continueBoth() {
  const form = $("continue").elements;
  const seed = form.seed.value === "" ? 0 : Number(form.seed.value);
  $("continued").replaceChildren();
  showError(null);
  continuing?.abort();
  const { signal } = (continuing = new AbortController());
  await Promise.all(
    ticked.map(async (name) => {
      const text = el("p", { className: "tokens" }, "Loading …");
      $("continued").append(el("section", { "aria-label": name }, el("h3", {}, visible(name)), text));
      try {
        const body = { model: `runs/${name}`, prompt: form.prompt.value, echo: true, logprobs: 0, seed, max_tokens: 200 };
        let first = true;
        for await (const event of api.stream("page/completions", body, signal)) {
          if (first) text.textContent = "";
          first = false;
          text.append(visible(event.tokens.map((token) => token.text).join("")));
        }
      } catch (error) {
        if (error.name === "AbortError") return;
        text.textContent = error.message;
        text.classList.add("failed");
      }
    }),
  );
  if (!signal.aborted) $("live").textContent = "Both texts are complete.";
}
