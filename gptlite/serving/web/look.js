// The view into the model while it predicts the selected token: attention, and the logit lens.

import * as api from "./api.js";
import { $, el, named, percent, showError } from "./dom.js";
import { current } from "./generate.js";
import { TokenList } from "./tokens.js";

const GUESSES = 5;

let settings = null;
let list = null;
let before = [];
let tokens = [];
let found = null; // of the server, for the selected token
let head = null; // [layer, head], or null: the mean of all
let asked = 0;

export function start(given) {
  settings = given;
  list = new TokenList($("look-text"), { onSelect: look });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => found && drawHeads());
}

/** The view is opened. */
export function open() {
  const now = current();
  const nothing = !now.tokens.length;
  $("look-text").hidden = nothing;
  if (nothing) return;
  ({ before, tokens } = now);
  list.show(tokens);
  list.select(now.selected ?? tokens.length - 1);
}

/** The ids that the model reads, and the place in them of the token before token `i`. */
function input(i) {
  const room = settings.look_length;
  const from = Math.max(0, before.length + i + 1 - room);
  const start = from ? [] : before;
  const ids = [...start, ...tokens.slice(from, from + room - start.length).map((t) => t.id)];
  return { ids, place: start.length + i - from - 1, shift: from - start.length };
}

async function look(i) {
  const mine = ++asked;
  const { ids, place, shift } = input(i);
  $("look-status").textContent = "Looking … (the first time, a program is compiled)";
  if (place < 0) {
    found = null;
    draw(i);
    $("look-status").textContent = "Nothing predicts the first token: select a later one.";
    return;
  }
  try {
    showError(null);
    const answer = await api.post("page/look", { model: settings.model, ids, place });
    if (mine !== asked) return;
    found = { ...answer, shift };
    draw(i);
    const name = named(tokens[i].text);
    list.place.children[i].setAttribute("aria-label", `${name}, ${percent(tokens[i].log_prob)}`);
    $("look-status").textContent =
      `How ${name} was predicted, from the ${place ? `${place + 1} tokens` : "token"} before it.`;
  } catch (error) {
    if (mine !== asked) return;
    $("look-status").textContent = "";
    found = null;
    draw(i);
    showError(error);
  }
}

function draw(i) {
  $("lens").hidden = $("heads").hidden = found === null;
  if (found === null) return highlight();
  drawLens(i);
  drawHeads();
  highlight();
}

function drawLens(i) {
  const cell = ([id, text, logProb]) => {
    const made = el("td", {}, named(text), " ", el("small", {}, percent(logProb)));
    made.style.setProperty("--p", Math.exp(logProb ?? -99));
    if (id === tokens[i].id) made.classList.add("right");
    return made;
  };
  const last = found.guesses.length - 1;
  $("lens").querySelector("thead").replaceChildren(
    el(
      "tr",
      {},
      el("th", { scope: "col" }, "after"),
      ...Array.from({ length: GUESSES }, (_, k) => el("th", { scope: "col" }, `${k + 1}`)),
      el("th", { scope: "col" }, named(tokens[i].text)),
    ),
  );
  $("lens").querySelector("tbody").replaceChildren(
    ...found.guesses.map((guess, k) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, k === 0 ? "embedding" : `layer ${k}${k === last ? ", the last" : ""}`),
        ...guess.best.slice(0, GUESSES).map(cell),
        el("td", {}, percent(guess.next)),
      ),
    ),
  );
}

function drawHeads() {
  const mean = el("button", { type: "button" }, "Mean of all heads");
  mean.addEventListener("click", () => choose(null));
  const rows = found.layers.map((layer, l) => {
    const row = el(
      "div",
      { className: "layer", role: "group", "aria-label": layer.name },
      el("span", { title: layer.name }, `layer ${l + 1}`),
      ...layer.maps.map((map, h) => {
        const button = el("button", { type: "button", "aria-label": `layer ${l + 1}, head ${h + 1}` });
        button.append(picture(map, layer.side));
        button.addEventListener("click", () => choose([l, h]));
        return button;
      }),
    );
    row.style.setProperty("--heads", layer.maps.length);
    return row;
  });
  const nothing = el("p", {}, "No attention of this model has weights.");
  $("heads").querySelector("div").replaceChildren(...(rows.length ? [el("p", {}, mean), ...rows] : [nothing]));
  if (head && !found.layers[head[0]]?.maps[head[1]]) head = null;
  press();
}

function choose(some) {
  head = some;
  press();
  highlight();
}

function press() {
  const [mean, ...others] = $("heads").querySelectorAll("button");
  const places = found.layers.flatMap((layer, l) => layer.maps.map((_, h) => [l, h]));
  mean?.setAttribute("aria-pressed", head === null);
  others.forEach((button, k) => {
    button.setAttribute("aria-pressed", head !== null && places[k].join() === head.join());
  });
}

/** A map of weights, a byte for each, as a picture whose colour is that of the text. The shade is
 * the root of the weight, so that small ones are seen. */
function picture(map, side) {
  const canvas = el("canvas", { width: side, height: side });
  const bytes = Uint8Array.from(atob(map), (c) => c.charCodeAt(0));
  const context = canvas.getContext("2d");
  const image = context.createImageData(side, side);
  const rgb = getComputedStyle(document.body).getPropertyValue("--ink-rgb").split(",").map(Number);
  bytes.forEach((byte, k) => image.data.set([...rgb, Math.sqrt(255 * byte)], 4 * k));
  context.putImageData(image, 0, 0);
  return canvas;
}

/** The weights of the chosen head on the text. */
function highlight() {
  const rows = found === null ? [] : head === null ? found.layers.flatMap((layer) => layer.row) : [found.layers[head[0]].row[head[1]]];
  const spans = [...$("look-text").children];
  const weights = spans.map((_, i) => {
    const k = i - (found?.shift ?? 0);
    return rows.length ? rows.reduce((sum, row) => sum + (row[k] ?? 0), 0) / rows.length : 0;
  });
  const most = Math.max(...weights, 1e-9); // the darkest
  spans.forEach((span, i) => {
    span.classList.add("read");
    span.style.setProperty("--p", (weights[i] / most).toFixed(3));
    span.title = weights[i] >= 0.001 ? `weight ${weights[i].toFixed(3)}` : "";
  });
}
