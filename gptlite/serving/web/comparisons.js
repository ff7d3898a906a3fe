// Comparisons, from their ledgers: intervals, curves of all seeds, verdicts with their reasons.

import * as api from "./api.js";
import { draw } from "./chart.js";
import { $, el, showError, visible } from "./dom.js";

const COLORS = 8;
const shown = new Map(); // by name

export async function showComparisons() {
  const names = await api.get("page/comparisons");
  $("comparisons").hidden = !names.length;
  for (const name of shown.keys()) if (!names.includes(name)) shown.delete(name);
  for (const name of names) if (!shown.has(name)) shown.set(name, comparison(name));
  // Those that are open stay so.
  const place = $("comparisons").querySelector("div");
  const now = names.map((name) => shown.get(name));
  if (now.length !== place.children.length || now.some((element, k) => place.children[k] !== element)) place.replaceChildren(...now);
}

function comparison(name) {
  const inside = el("div");
  const details = el("details", {}, el("summary", {}, visible(name)), inside);
  // Opened again, it is read again: it may be running.
  details.addEventListener("toggle", async () => {
    if (!details.open) return;
    const found = await api.get(`page/comparisons/${encodeURIComponent(name)}`).catch(showError);
    if (found) show(inside, found);
  });
  return details;
}

function show(inside, { groups, confirmed, ledger }) {
  const lines = ledger.map(({ at, words }) => el("li", {}, `${new Date(at).toLocaleString()}  ${visible(words)}`));
  inside.replaceChildren(
    ...groups.map(group),
    ...(confirmed.length ? [el("h3", {}, "On the validation text"), ...confirmed.map((said) => el("p", {}, visible(said)))] : []),
    el("details", { className: "ledger" }, el("summary", {}, `Ledger, ${lines.length} entries`), el("ol", {}, ...lines)),
  );
  // Now that the canvases have a size.
  const canvases = [...inside.querySelectorAll("canvas")];
  groups.forEach((rows, k) => draw(canvases[k], curvesOf(rows), { logX: false, logY: false }));
}

const color = (place) =>
  getComputedStyle(document.body).getPropertyValue(place ? `--c${(place - 1) % COLORS}` : "--ink");

function curvesOf(rows) {
  return rows.flatMap(({ evaluated_at, curves }, place) =>
    curves.map((curve) => {
      const known = evaluated_at.map((step, k) => [step, curve[k]]).filter(([, loss]) => loss !== null);
      return { color: color(place), dashed: false, points: [known.map(([step]) => step), known.map(([, loss]) => loss)] };
    }),
  );
}

/** A base and its variants. */
function group(rows) {
  const [base, ...variants] = rows;
  // The largest end of an interval, on both sides.
  const ends = variants.map((row) => Math.abs(row.difference ?? 0) + (row.difference_margin ?? 0));
  const most = Math.max(...ends, 1e-9);
  const heads = ["", "verdict", `Δ ${visible(base.variant)}`, "", "choice loss", "seeds", "steps"];
  const table = el(
    "table",
    {},
    el("thead", {}, el("tr", {}, ...heads.map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, ...rows.map((row, place) => line(row, place, most))),
  );
  const seeds = rows.reduce((sum, row) => sum + row.curves.length, 0);
  const canvas = el("canvas", { className: "curves", role: "img" });
  canvas.setAttribute("aria-label", `Losses on the choice text of ${seeds} seeds of ${rows.length} variants. The last ones are in the table.`);
  return el("section", {}, el("div", { className: "wide" }, table), canvas);
}

function line(row, place, most) {
  const swatch = el("span", { className: "swatch", "aria-hidden": "true" });
  swatch.style.background = color(place);
  const number = (value, margin, sign) => {
    if (value === null) return "–";
    const text = `${sign && value >= 0 ? "+" : ""}${value.toFixed(4)}`;
    return margin === null ? text : `${text} ± ${margin.toFixed(4)}`;
  };
  const reason = row.reason ? el("small", {}, ` ${visible(row.reason)}`) : "";
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, swatch, visible(row.variant)),
    el("td", { className: "verdict" }, visible(row.verdict), reason),
    el("td", {}, place ? number(row.difference, row.difference_margin, true) : ""),
    el("td", {}, place && row.difference !== null ? interval(row, place, most) : ""),
    el("td", {}, number(row.choice_loss, row.choice_loss_margin, false)),
    el("td", {}, String(row.seeds)),
    el("td", {}, row.steps.toLocaleString("en")),
  );
}

/** The interval of a difference beside 0, better to the left. The figures stand beside it. */
function interval({ difference, difference_margin }, place, most) {
  const x = (value) => 50 + 48 * (value / most); // per cent
  const margin = difference_margin ?? 0;
  const [bar, dot] = [el("span"), el("i")];
  bar.style.left = `${x(difference - margin)}%`;
  bar.style.right = `${100 - x(difference + margin)}%`;
  dot.style.left = `${x(difference)}%`;
  for (const part of [bar, dot]) part.style.background = color(place);
  return el("span", { className: "interval", "aria-hidden": "true" }, bar, dot);
}
