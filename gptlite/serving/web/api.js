// Requests to the server.

import { $, showError } from "./dom.js";

let key = sessionStorage.getItem("key");

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is gptlite serve running?");
  }
  if (answer.status === 401) {
    if (key) showError(new Error("The key is wrong."));
    key = await askForKey();
    return request(path, options);
  }
  if (!answer.ok) throw new Error(await sentence(answer));
  return answer;
}

async function sentence(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || `The server answered ${answer.status}.`;
  }
}

let asking = null;

function askForKey() {
  asking ??= new Promise((resolve) => {
    const form = $("key");
    form.hidden = false;
    form.elements.key.focus();
    form.onsubmit = (event) => {
      event.preventDefault();
      const given = form.elements.key.value;
      if (!/^[ -~]*$/.test(given)) {
        showError(new Error("The key is wrong."));
        return;
      }
      sessionStorage.setItem("key", given);
      form.reset();
      form.hidden = true;
      showError(null);
      asking = null;
      resolve(given);
    };
  });
  return asking;
}

const posted = (body, signal) => ({
  method: "POST",
  headers: { "Content-Type": "application/json" },
  body: JSON.stringify(body),
  signal,
});

export const get = async (path) => (await request(path)).json();


export const post = async (path, body, signal) => (await request(path, posted(body, signal))).json();

/** Server-sent events, one by one. */
export async function* stream(path, body, signal) {
  const answer = await request(path, posted({ ...body, stream: true }, signal));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw new Error("The server ended before the text did.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (!line.startsWith("data: ")) continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
