// Small helpers. Text of a model only ever becomes a text node.

export const $ = (id) => document.getElementById(id);

/** An element with properties (`data-…`, `aria-…` and `role` as attributes) and children. */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (/-|^role$/.test(name)) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

// What would be invisible, or would change how the rest is shown.
const UNSEEN = /(?![\t\n])[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\u2800]/gu;

/** A text in which every character can be seen; line breaks and tabs stay as they are. */
export function visible(text) {
  return text.replace(UNSEEN, (c) => {
    const code = c.codePointAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : `⟨${code.toString(16).padStart(4, "0")}⟩`;
  });
}

/** A token on one line, in which spaces and line breaks can be seen. */
export function named(text) {
  const shown = visible(text).replaceAll("\n", "↵").replaceAll("\t", "⇥");
  return shown === "" ? "(no character)" : shown.replaceAll(" ", "␣");
}

/** A log probability as per cent. */
export function percent(logProb) {
  if (logProb === null) return "–";
  const p = 100 * Math.exp(logProb);
  return `${p >= 10 ? p.toFixed(0) : p >= 0.1 ? p.toFixed(1) : p.toPrecision(1)} %`;
}

/** From 0 (certain) to 9 (a surprise). */
export function surprise(logProb) {
  return logProb === null ? 0 : Math.min(9, Math.floor(-1.5 * logProb));
}

export function showError(error) {
  const place = $("error");
  const text = error ? error.message : "";
  place.hidden = !error;
  if (place.textContent !== text) place.textContent = text; // otherwise it would be said again
}
