// The page: its views, one of which is shown.

import * as api from "./api.js";
import { $, showError } from "./dom.js";
import * as generate from "./generate.js";
import * as look from "./look.js";
import * as runs from "./runs.js";

const tabs = [...document.querySelectorAll("[role=tab]")];

function open(tab, focus = false) {
  for (const other of tabs) {
    const isOpen = other === tab;
    other.setAttribute("aria-selected", isOpen);
    other.tabIndex = isOpen ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = !isOpen;
  }
  if (focus) tab.focus();
  const view = tab.getAttribute("aria-controls");
  history.replaceState(null, "", `#${view}`);
  if (view === "look") look.open();
  if (view === "runs") runs.open();
}

try {
  const settings = await api.get("page/settings");
  $("model").textContent = settings.model;
  document.title = `gptlite: ${settings.model}`;
  generate.start(settings);
  look.start(settings);
  runs.start();
  for (const tab of tabs) {
    tab.addEventListener("click", () => open(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) open(tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length], true);
    });
  }
  open(tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash) ?? tabs[0]);
} catch (error) {
  showError(error);
}
