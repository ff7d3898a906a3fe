// The view that generates and scores texts, with the rivals of each token and the tree of branches.

import * as api from "./api.js";
import { $, el, named, percent, showError, surprise } from "./dom.js";
import { TokenList } from "./tokens.js";
import { Branch } from "./tree.js";

const RIVALS = 10;
const SURPRISES = 10;
const ANNOUNCE_MS = 3000;
const KNOBS = ["temperature", "top_k", "top_p", "min_p"];

let settings = null;
let branch = new Branch();
let running = null;
let list = null;

/** What the other views need: the tokens that are shown, and which is selected. */
export const current = () => ({ tokens: branch.path(), selected: list.selected });

export function start(found) {
  settings = found;
  list = new TokenList($("text"), {
    onSelect: showRivals,
    onEnter: () => $("rivals").querySelector("button")?.focus(),
    style: (token, i) => `p${surprise(token.log_prob)}${branches(i).length > 1 ? " branched" : ""}`,
  });
  for (let i = 0; i < 10; i++) {
    const percents = i ? `${Math.round(100 * Math.exp(-i / 1.5))} %` : "100 %";
    $("legend").lastElementChild.append(el("span", { className: `token p${i}` }, i % 3 ? "" : percents));
  }
  connectKnobs();
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    begin();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) begin();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("score").addEventListener("click", score);
  $("rivals").addEventListener("keydown", moveInRivals);
}

// -- knobs --------------------------------------------------------------------------------------

function connectKnobs() {
  const limits = { ...settings.bounds, top_k: [1, settings.vocab_size] };
  for (const name of KNOBS) {
    const [low, high] = limits[name];
    const number = $(name);
    const slider = document.querySelector(`[data-of=${name}]`);
    number.min = low;
    if (high !== null) number.max = high;
    if (name !== "temperature") {
      slider.min = low;
      slider.max = high;
    }
    const off = slider.dataset.off;
    const rest = off ? slider[off] : "1";
    slider.value = rest;
    slider.addEventListener("input", () => {
      number.value = off && slider.value === rest ? "" : slider.value;
    });
    number.addEventListener("input", () => {
      slider.value = number.value === "" ? rest : number.value;
    });
  }
  $("temperature").min = 0; // greedy, for which sample.py has an option
}

/** The settings of a request. */
function asked() {
  const body = { model: settings.model, logprobs: RIVALS };
  for (const name of [...KNOBS, "max_tokens", "seed"]) {
    const input = $(name);
    if (!input.checkValidity()) {
      const what = name === "max_tokens" ? "max_new_tokens" : name;
      throw new Error(`${what}: ${input.validationMessage}`);
    }
    if (input.value !== "") body[name] = Number(input.value);
  }
  body.seed ??= crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
  return body;
}

// -- generating ---------------------------------------------------------------------------------

function begin() {
  run(async (signal) => {
    const body = { ...asked(), prompt: $("prompt").value, echo: true };
    show(new Branch());
    await receive(body, branch, signal);
  });
}

/** Go on after a rival of token `i`. */
function follow(i, [id, text, log_prob]) {
  const original = branch.path()[i];
  run(async (signal) => {
    const body = asked();
    // With the same seed, it would be drawn as the beginning of the text was.
    body.seed = (body.seed + i) % (Number($("seed").max) + 1);
    // A token that ends inside a character has no text of its own yet.
    const added = /^bytes:(\\x[0-9a-f]{2})+$/.test(text) ? "" : text;
    const next = branch.branch(i, { id, text: added, log_prob, rivals: original.rivals });
    const isNew = next.tokens.length === 1 && next.at === i;
    show(next, i, true);
    if (!isNew) return;
    await receive({ ...body, prompt: promptIds(next.path()) }, next, signal);
  });
}

/** The ids of a text, as a prompt. Of one that is longer than the context, the end is read. */
export function promptIds(tokens) {
  const ids = tokens.map((token) => token.id);
  const most = settings.context_length;
  if (settings.start_ids.length + ids.length <= most) return [...settings.start_ids, ...ids];
  return ids.slice(-Math.max(1, Math.floor(most / 2)));
}

async function run(work) {
  running?.abort();
  const mine = (running = new AbortController());
  showError(null);
  $("stop").disabled = false;
  try {
    await work(mine.signal);
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
  } finally {
    if (running === mine) {
      running = null;
      $("stop").disabled = true;
    }
  }
}

/** Add what the server generates to a branch. */
async function receive(body, target, signal) {
  const began = performance.now();
  const before = target.path().length;
  let said = "";
  let saidAt = began;
  let frame = null;
  let generated = 0;
  const draw = () => {
    frame = null;
    if (branch === target) list.append(target.path().slice(list.count));
    const seconds = (performance.now() - began) / 1000;
    $("status").textContent =
      `${generated} tokens, ${(generated / seconds).toFixed(0)} a second, seed ${body.seed}`;
    $("legend").hidden = false;
  };
  $("status").textContent = "Waiting for the server …";
  try {
    let first = body.echo;
    for await (const event of api.stream("page/completions", body, signal)) {
      target.tokens.push(...event.tokens);
      if (first && event.tokens.length) first = false;
      else generated += event.tokens.length;
      said += event.tokens.map((token) => token.text).join("");
      if (performance.now() - saidAt > ANNOUNCE_MS) {
        $("live").textContent = said;
        said = "";
        saidAt = performance.now();
      }
      frame ??= requestAnimationFrame(draw);
    }
  } finally {
    if (frame !== null) cancelAnimationFrame(frame);
    draw();
    $("live").textContent = said;
    if (branch === target) summarize(before);
    showBranches();
  }
}

function summarize(from) {
  const scored = branch.path().slice(from).filter((token) => token.log_prob !== null);
  if (!scored.length) return;
  const nats = -scored.reduce((sum, token) => sum + token.log_prob, 0) / scored.length;
  $("status").textContent += `, ${nats.toFixed(3)} nats a token`;
}

// -- scoring ------------------------------------------------------------------------------------

function score() {
  run(async (signal) => {
    const text = $("prompt").value;
    $("status").textContent = "Scoring …";
    const found = await api.post("page/score", { model: settings.model, text }, signal);
    const made = new Branch();
    made.tokens = found.tokens;
    show(made);
    const one = (value, digits) => (value === null ? "–" : value.toFixed(digits));
    $("status").textContent =
      `${found.tokens.length} tokens: ${one(found.nats_per_token, 4)} nats a token, ` +
      `${one(found.bits_per_byte, 4)} bits per byte`;
    showSurprises();
  });
}

function showSurprises() {
  const tokens = branch.path();
  const places = [...tokens.keys()].filter((i) => tokens[i].log_prob !== null);
  places.sort((a, b) => tokens[a].log_prob - tokens[b].log_prob);
  const worst = places.slice(0, SURPRISES);
  for (const i of worst) $("text").children[i].classList.add("surprising");
  $("surprises").hidden = !worst.length;
  $("surprises").querySelector("ol").replaceChildren(
    ...worst.map((i) => {
      const before = tokens.slice(Math.max(0, i - 12), i).map((token) => token.text).join("");
      const button = el(
        "button",
        { type: "button" },
        `…${named(before.slice(-12))}`,
        el("b", {}, named(tokens[i].text)),
        ` ${percent(tokens[i].log_prob)}`,
      );
      button.addEventListener("click", () => list.select(i, true));
      return el("li", {}, button);
    }),
  );
}

// -- what is shown ------------------------------------------------------------------------------

/** Show a branch; its token `i` is selected, and with `focus` the keyboard is there. */
function show(next, i = null, focus = false) {
  branch = next;
  $("surprises").hidden = true;
  $("rivals").hidden = true;
  list.show(branch.path());
  $("legend").hidden = !list.count;
  if (i !== null) list.select(i, focus);
  showBranches();
}

const branches = (i) => branch.alternatives(i);

function showRivals(i) {
  const token = branch.path()[i];
  const place = $("rivals");
  place.hidden = false;
  const rank = token.rivals.findIndex(([id]) => id === token.id);
  const which = rank < 0 ? (token.rivals.length ? `, not among the best ${token.rivals.length}` : "") : `, number ${rank + 1}`;
  const probability =
    token.log_prob === null ? "the beginning, which nothing predicts" : `${percent(token.log_prob)}${which}`;
  const name = named(token.text);
  place.querySelector("h2").textContent = `${name}: ${probability}`;
  $("text").children[i].setAttribute("aria-label", `${name}, ${probability}`);
  const known = new Set(branches(i).map((b) => b.path()[i].id));
  place.querySelector("ol").replaceChildren(
    ...token.rivals.map((rival) => {
      const [id, text, logProb] = rival;
      const bar = el("span", { className: "bar" });
      bar.style.setProperty("--p", Math.exp(logProb ?? -99));
      const button = el(
        "button",
        { type: "button" },
        el("span", { className: "name" }, named(text)),
        bar,
        el("span", { className: "percent" }, percent(logProb)),
      );
      if (id === token.id) button.setAttribute("aria-current", "true");
      else if (known.has(id)) button.classList.add("known");
      button.addEventListener("click", () => (id === token.id ? list.select(i, true) : follow(i, rival)));
      return el("li", {}, button);
    }),
  );
}

function moveInRivals(event) {
  const buttons = [...$("rivals").querySelectorAll("button")];
  const now = buttons.indexOf(document.activeElement);
  if (event.key === "Escape") list.select(list.selected ?? 0, true);
  else if (event.key === "ArrowDown") buttons[Math.min(now + 1, buttons.length - 1)]?.focus();
  else if (event.key === "ArrowUp") buttons[Math.max(now - 1, 0)]?.focus();
  else return;
  event.preventDefault();
}

function showBranches() {
  const place = $("branches");
  const hadFocus = place.contains(document.activeElement);
  place.hidden = !branch.root.children.length;
  place.querySelector("div").replaceChildren(outline(branch.root));
  if (hadFocus) place.querySelector("[aria-current]").focus();
}

function outline(some) {
  const begin = some.tokens.slice(0, 12).map((token) => token.text).join("");
  const button = el("button", { type: "button" }, some.parent ? `${some.at}: ${named(begin)}` : named(begin));
  if (some === branch) button.setAttribute("aria-current", "true");
  button.addEventListener("click", () => show(some, some.parent ? some.at : null));
  const item = el("li", {}, button);
  if (some.children.length) item.append(el("ul", {}, ...some.children.map((child) => outline(child).firstChild)));
  return el("ul", {}, item);
}
