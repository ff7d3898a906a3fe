// A text as a list of tokens, one of which is selected: with the pointer, or with arrow keys.

import { el, visible } from "./dom.js";

const HOVER_MS = 120; // so that the pointer can cross other tokens on its way to the rivals

export class TokenList {
  #timer = null; // of a token that the pointer is on
  /**
   * `onSelect(i)`: a token is selected. `onEnter(i)`: it is chosen with Enter.
   * `style(token, i)`: its class.
   */
  constructor(place, { onSelect, onEnter = () => {}, style = () => "" }) {
    this.place = place;
    this.style = style;
    this.onSelect = onSelect;
    this.count = 0;
    this.selected = null;
    const index = (event) => {
      const token = event.target.closest("[role=option]");
      return token ? [...place.children].indexOf(token) : null;
    };
    place.addEventListener("pointermove", (event) => {
      // Without movement, it is the text that has moved.
      if (event.pointerType === "touch" || !(event.movementX || event.movementY)) return;
      clearTimeout(this.#timer);
      const i = index(event);
      if (i !== null && i !== this.selected) this.#timer = setTimeout(() => this.#mark(i), HOVER_MS);
    });
    place.addEventListener("pointerleave", () => clearTimeout(this.#timer));
    place.addEventListener("click", (event) => {
      const i = index(event);
      if (i !== null) this.select(i, true);
    });
    place.addEventListener("focus", () => this.count && this.select(this.selected ?? 0, true));
    place.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey || !this.count) return;
      const now = this.selected ?? 0;
      const moves = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: this.count - 1 };
      if (event.key in moves) this.select(moves[event.key], true);
      else if (event.key === "ArrowUp" || event.key === "ArrowDown") this.#line(event.key === "ArrowUp");
      else if (event.key === "Enter") onEnter(now);
      else return;
      event.preventDefault();
    });
  }

  /** Show other tokens. */
  show(tokens) {
    this.place.replaceChildren();
    this.count = 0;
    this.selected = null;
    this.place.tabIndex = 0;
    this.append(tokens);
  }

  append(tokens) {
    const made = tokens.map((token, j) => this.#span(token, this.count + j));
    for (const span of made) this.place.append(span);
    this.count += tokens.length;
  }

  /** Select token `i`, and scroll to it; with `focus`, the keyboard goes there too. */
  select(i, focus = false) {
    const next = this.#mark(i);
    if (focus) next?.focus({ preventScroll: true });
    next?.scrollIntoView({ block: "nearest" });
  }

  #mark(i) {
    clearTimeout(this.#timer);
    const next = this.place.children[Math.max(0, Math.min(i, this.count - 1))];
    if (!next) return null;
    const last = this.place.children[this.selected ?? -1];
    if (last) {
      last.removeAttribute("aria-selected");
      last.tabIndex = -1;
    }
    this.selected = [...this.place.children].indexOf(next);
    next.setAttribute("aria-selected", "true");
    next.tabIndex = 0;
    this.place.tabIndex = -1;
    this.onSelect(this.selected);
    return next;
  }

  /** To the nearest token of the line above or below. */
  #line(up) {
    const spans = [...this.place.children];
    const from = spans[this.selected ?? 0].getClientRects()[0];
    let best = null;
    spans.forEach((span, i) => {
      const to = span.getClientRects()[0];
      const down = to ? to.top - from.top : 0;
      if (!to || (up ? down > -2 : down < 2)) return;
      const far = 1000 * Math.abs(down) + Math.abs(to.left - from.left);
      if (best === null || far < best.far) best = { far, i };
    });
    if (best) this.select(best.i, true);
  }

  #span(token, i) {
    const text = visible(token.text);
    const span = el("span", { role: "option", tabIndex: -1, className: `token ${this.style(token, i)}` });
    // A line break is shown, and breaks the line.
    for (const part of text.split(/(\n)/)) {
      if (part === "\n") span.append(el("span", { className: "mark", "aria-hidden": "true" }, "↵"), "\n");
      else span.append(part);
    }
    if (text === "") span.append(el("span", { className: "mark" }, "·"));
    return span;
  }
}
