// The view of all runs: a table, curves of those that are ticked, and two of them side by side.

import * as api from "./api.js";
import { draw } from "./chart.js";
import { $, el, showError, visible } from "./dom.js";

const EVERY_MS = 2000;
const DRAW_MS = 250; // while curves are read
const TICKED = 3; // at first
const COLORS = 8;

let runs = [];
let ticked = null; // names, in the order of their colours
let timer = null;
let listed = ""; // what the table shows
let compared = ""; // what the difference shows
let drawing = null;
const curves = new Map(); // by name: { file, end, train, validation }
const reading = new Map(); // by name: the promise of curves that are being read

const shown = () => !$("runs").hidden && !document.hidden;

export function start() {
  for (const id of ["log-loss", "log-steps", "show-train", "show-validation"]) $(id).addEventListener("change", redraw);
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => ticked && (paint(), redraw()));
  document.addEventListener("visibilitychange", () => shown() && open());
  $("all-runs").addEventListener("change", () => tick($("all-runs").checked ? runs.map((run) => run.name) : []));
  $("continue").addEventListener("submit", (event) => {
    event.preventDefault();
    continueBoth();
  });
}

/** The view is opened. */
export async function open() {
  clearTimeout(timer);
  await refresh();
  showComparisons();
}

async function refresh() {
  try {
    runs = await api.get("page/runs");
    ticked ??= runs.slice(0, TICKED).map((run) => run.name);
    showError(null);
    showTable();
    await tick(ticked.filter((name) => runs.some((run) => run.name === name)));
  } catch (error) {
    showError(error);
  }
  clearTimeout(timer);
  if (shown()) timer = setTimeout(refresh, EVERY_MS);
}

/** Show the curves of these runs, and of no others. */
async function tick(names) {
  ticked = names;
  paint();
  redraw();
  try {
    await Promise.all([showPair(), ...names.map(follow)]);
  } catch (error) {
    showError(error);
  }
}

/** Read what a run has added to its metrics, unless that is under way. */
function follow(name) {
  if (!reading.has(name)) reading.set(name, read(name).finally(() => reading.delete(name)));
  return reading.get(name);
}

async function read(name) {
  const changed = runs.find((run) => run.name === name)?.changed;
  let known = curves.get(name) ?? { file: 0, end: 0, changed: null, train: [[], []], validation: [[], []] };
  if (known.changed === changed || !changed) return;
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
  curves.set(name, { ...known, changed });
  drawing ??= setTimeout(redraw, DRAW_MS);
}

// -- table --------------------------------------------------------------------------------------

const count = (n) => (n === null ? "–" : n.toLocaleString("en"));

const color = (name) =>
  getComputedStyle(document.body).getPropertyValue(`--c${ticked.indexOf(name) % COLORS}`);

function showTable() {
  const now = JSON.stringify(runs);
  if (now === listed) return;
  listed = now;
  $("no-runs").hidden = runs.length > 0;
  $("with-runs").hidden = !runs.length;
  const body = $("runs-table").tBodies[0];
  const focused = document.activeElement?.closest?.("#runs-table input")?.value;
  body.replaceChildren(
    ...runs.map((run) => {
      const box = el("input", { type: "checkbox", value: run.name, "aria-label": `Show ${run.name}` });
      box.addEventListener("change", () =>
        tick(box.checked ? [...ticked, run.name] : ticked.filter((name) => name !== run.name)),
      );
      const swatch = el("span", { className: "swatch", "aria-hidden": "true" });
      return el(
        "tr",
        {},
        el("td", {}, box, swatch),
        el("th", { scope: "row" }, visible(run.name)),
        el("td", { className: run.state }, run.state),
        el("td", {}, run.preset ?? "–"),
        el("td", {}, count(run.parameters)),
        el("td", {}, `${count(run.step)} / ${count(run.steps)}`),
        el("td", {}, run.best_loss === null ? "–" : run.best_loss.toFixed(4)),
        el("td", {}, new Date(1000 * run.began).toLocaleString()),
      );
    }),
  );
  if (focused !== undefined) [...body.querySelectorAll("input")].find((box) => box.value === focused)?.focus();
}

/** Mark the runs that are ticked, with the colours of their curves. */
function paint() {
  for (const box of $("runs-table").querySelectorAll("tbody input")) {
    box.checked = ticked.includes(box.value);
    box.nextSibling.style.background = box.checked ? color(box.value) : "";
  }
  $("all-runs").checked = runs.length > 0 && ticked.length === runs.length;
  $("all-runs").indeterminate = ticked.length > 0 && ticked.length < runs.length;
}

function redraw() {
  clearTimeout(drawing);
  drawing = null;
  if (!shown() || ticked === null) return;
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
  draw(canvas, some, { logX: $("log-steps").checked, logY: $("log-loss").checked });
}

// -- two runs -----------------------------------------------------------------------------------

async function showPair() {
  $("pair").hidden = ticked.length !== 2;
  $("pair-hint").hidden = ticked.length === 2;
  const pair = ticked.join("\n");
  if (ticked.length !== 2 || pair === compared) return;
  const both = ticked;
  const [a, b] = await Promise.all(both.map((name) => api.get(`page/runs/${encodeURIComponent(name)}/config`)));
  if (pair !== ticked.join("\n") || pair === compared) return; // since then
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
  $("continued").replaceChildren();
}

/** The same prompt and seed, continued by both. */
async function continueBoth() {
  const form = $("continue").elements;
  const seed = form.seed.value === "" ? 0 : Number(form.seed.value);
  $("continued").replaceChildren();
  showError(null);
  await Promise.all(
    ticked.map(async (name) => {
      const text = el("p", { className: "tokens" }, "Loading …");
      $("continued").append(el("section", { "aria-label": name }, el("h3", {}, visible(name)), text));
      try {
        const body = { model: name, prompt: form.prompt.value, echo: true, logprobs: 0, seed, max_tokens: 200 };
        let first = true;
        for await (const event of api.stream("page/completions", body)) {
          if (first) text.textContent = "";
          first = false;
          text.append(visible(event.tokens.map((token) => token.text).join("")));
        }
      } catch (error) {
        text.textContent = error.message;
        text.classList.add("failed");
      }
    }),
  );
}

// -- comparisons --------------------------------------------------------------------------------

let known = "";

async function showComparisons() {
  const names = await api.get("page/comparisons");
  if (names.join("\n") === known) return;
  known = names.join("\n");
  $("comparisons").hidden = !names.length;
  $("comparisons").querySelector("div").replaceChildren(
    ...names.map((name) => {
      const details = el("details", {}, el("summary", {}, visible(name)));
      details.addEventListener("toggle", async () => {
        if (details.childElementCount > 1) return;
        const picture = await api.blob(`page/comparisons/${encodeURIComponent(name)}`);
        details.append(el("img", { alt: `The losses of the variants of ${name}`, src: URL.createObjectURL(picture) }));
      });
      return details;
    }),
  );
}
