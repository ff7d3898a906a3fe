// The view that generates and scores texts, with the rivals of each token and the tree of branches.

import * as api from "./api.js";
import { $, el, named, percent, showError, surprise } from "./dom.js";
import { TokenList } from "./tokens.js";
import { Branch } from "./tree.js";

const RIVALS = 10;
const SURPRISES = 10;
const ANNOUNCE_MS = 3000;
const ANNOUNCED = 300; // characters at most
const KNOBS = ["temperature", "top_k", "top_p", "min_p"];

let settings = null;
let branch = new Branch();
let running = null;
let list = null;

/** What the other views need: the tokens that are shown, and which is selected. */
export const current = () => ({ before: branch.before, tokens: branch.path(), selected: list.selected });

export function start(found) {
  settings = found;
  list = new TokenList($("text"), {
    onSelect: showRivals,
    onEnter: () => $("rivals").querySelector("button")?.focus(),
    style: (token, i) => `p${surprise(token.log_prob)}${branches(i).length > 1 ? " branched" : ""}`,
  });
  for (let i = 0; i < 10; i++) {
    const percents = i < 9 ? `${Math.round(100 * Math.exp(-i / 1.5))} %` : "< 1 %";
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
    const isLog = name === "top_k"; // of a large vocabulary, small numbers matter
    if (isLog) slider.max = Math.log(high);
    const off = slider.dataset.off;
    const rest = off ? slider[off] : "1";
    const say = () => slider.setAttribute("aria-valuetext", number.value || number.placeholder);
    slider.value = rest;
    slider.addEventListener("input", () => {
      const value = isLog ? Math.round(Math.exp(slider.value)) : slider.value;
      const isOff = off && Math.abs(slider.value - slider[off]) < 1e-9; // it keeps 15 digits
      number.value = isOff ? "" : value;
      say();
    });
    number.addEventListener("input", () => {
      slider.value = number.value === "" ? rest : isLog ? Math.log(number.value) : number.value;
      say();
    });
    say();
  }
  for (const label of document.querySelectorAll(".knob label")) label.control.title = label.title;
  $("temperature").min = 0; // greedy, for which gptlite sample has an option
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
    const made = new Branch();
    made.before = body.prompt ? settings.start_ids : settings.empty_ids;
    await receive(body, made, signal);
  });
}

/** Go on after a rival of token `i`. */
function follow(i, [id, text, log_prob, added = text]) {
  const original = branch.path()[i];
  const known = branches(i).find((other) => other.path()[i].id === id);
  if (known) return show(known, i, true);
  run(async (signal) => {
    const body = asked();
    // With the same seed, it would be drawn as the beginning of the text was.
    body.seed = (body.seed + i) % (Number($("seed").max) + 1);
    const next = branch.branch(i, { id, text: added, log_prob, rivals: original.rivals });
    show(next, i, true);
    await receive({ ...body, prompt: promptIds(next) }, next, signal);
  });
}

/** The ids of a text, as a prompt. Of one that is longer than the context, the end is read. */
function promptIds(some) {
  const ids = some.path().map((token) => token.id);
  const most = settings.context_length;
  if (some.before.length + ids.length <= most) return [...some.before, ...ids];
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
      if (document.activeElement === $("stop")) $("start").focus();
      $("stop").disabled = true;
      $("status").textContent = branch.status;
    }
  }
}

/** Add what the server generates to a branch, which is shown as soon as there is any. */
async function receive(body, target, signal) {
  const began = performance.now();
  let said = "";
  let saidAt = began;
  let frame = null;
  let generated = 0;
  let nats = 0;
  const draw = () => {
    frame = null;
    const seconds = (performance.now() - began) / 1000;
    target.status = `${generated} tokens, ${(generated / seconds).toFixed(0)} a second, seed ${body.seed}`;
    if (branch !== target) return;
    list.append(target.path().slice(list.count));
    if (running?.signal === signal) $("status").textContent = target.status;
    $("legend").hidden = false;
  };
  const say = () => {
    $("live").textContent = said.slice(-ANNOUNCED);
    said = "";
    saidAt = performance.now();
  };
  $("status").textContent = "Waiting for the server …";
  try {
    let isPrompt = Boolean(body.echo && body.prompt);
    for await (const { tokens } of api.stream("page/completions", body, signal)) {
      if (!target.parent && !target.tokens.length) show(target);
      target.tokens.push(...tokens);
      if (!isPrompt) {
        generated += tokens.length;
        nats -= tokens.reduce((sum, token) => sum + token.log_prob, 0);
      } else if (tokens.length) isPrompt = false;
      said += tokens.map((token) => token.text).join("");
      if (performance.now() - saidAt > ANNOUNCE_MS) say();
      frame ??= requestAnimationFrame(draw);
    }
  } finally {
    cancelAnimationFrame(frame);
    if (target.path().length) {
      draw();
      if (generated) target.status += `, ${(nats / generated).toFixed(3)} nats a token`;
      say();
      showBranches();
    }
  }
}

// -- scoring ------------------------------------------------------------------------------------

function score() {
  run(async (signal) => {
    const text = $("prompt").value;
    $("status").textContent = "Scoring …";
    const found = await api.post("page/score", { model: settings.model, text }, signal);
    const made = new Branch();
    made.before = settings.start_ids;
    made.tokens = found.tokens;
    made.isScored = true;
    const one = (value, digits) => (value === null ? "–" : value.toFixed(digits));
    made.status =
      `${found.tokens.length} tokens: ${one(found.nats_per_token, 4)} nats a token, ` +
      `${one(found.bits_per_byte, 4)} bits per byte`;
    show(made);
    $("live").textContent = made.status;
  });
}

function showSurprises() {
  const tokens = branch.isScored ? branch.path() : [];
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
  $("rivals").hidden = true;
  list.show(branch.path());
  $("legend").hidden = !list.count;
  $("status").textContent = branch.status;
  showSurprises();
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
      else if (known.has(id)) {
        button.classList.add("known");
        button.append(el("span", { className: "hidden" }, ", has a branch"));
      }
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
