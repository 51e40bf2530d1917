// Files that are dropped on the page, and command lines that are pasted.
"use strict";

const HEADER_BYTES = 48_000_000;  // of a large file its beginning is sent: headers are there
const MOST_BYTES = 64_000_000;    // of other files; of what is larger the size is sent alone, and the server says why not

async function post(address, body, isAgain = false) {
  try {
    const answer = await fetch(address, { method: "POST", headers: { "x-perfmodel-token": token }, body });
    if (answer.status === 403 && !isAgain && await renewToken()) return post(address, body, true);
    return await answer.json();
  } catch { return { error: "The server does not answer: is it still running?" }; }
}

// A server that was started again has another token; this page's own address says it.
async function renewToken() {
  const page = new DOMParser().parseFromString(await (await fetch(location.href, { headers: { accept: "text/html" } })).text(), "text/html");
  const found = $("meta[name=perfmodel-token]", page)?.content;
  if (!found || found === token) return false;
  token = found;
  return true;
}

async function drop(file) {
  const isHeaded = /\.(gguf|safetensors)$/i.test(file.name);
  const part = file.slice(0, isHeaded ? HEADER_BYTES : file.size > MOST_BYTES ? 0 : file.size);
  say("Reading " + file.name + " ...");
  const answer = await post("/drop?" + new URLSearchParams({ name: file.name, size: String(file.size) }), part);
  if (answer.error) { say(answer.error); return; }
  if (answer.field === "scenario") {
    const query = new URLSearchParams(queryOf());
    for (const key of ["model", "hardware", "scenario"]) query.delete(key);  // it has its own
    query.append("scenario", answer.mark);
    location.href = "/" + currentView() + "?" + query;
    return;
  }
  if (answer.field === "results") {
    const query = new URLSearchParams(queryOf());
    query.set("results", answer.mark);
    location.href = "/pareto?" + query;
    return;
  }
  const field = $(`#state [name="${answer.field}"]`);
  field.value = answer.mark.split("/").pop();
  field.dataset.mark = answer.mark;
  say(`${file.name} is the ${answer.field === "hardware" ? "device" : answer.field} now.`);
  show(true);
}

for (const name of ["dragover", "dragenter"]) {
  document.addEventListener(name, (event) => {
    if (![...event.dataTransfer.types].includes("Files")) return;
    event.preventDefault();
    $("#drop")?.classList.add("over");
  });
}
document.addEventListener("dragleave", () => $("#drop")?.classList.remove("over"));
document.addEventListener("drop", (event) => {
  $("#drop")?.classList.remove("over");
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  drop(event.dataTransfer.files[0]);
});

async function readLine() {
  const wrong = $("#line-wrong");
  wrong.hidden = true;
  const answer = await post("/line?" + queryOf(), $("#line").value);
  if (answer.error) { wrong.textContent = answer.error; wrong.hidden = false; return; }
  sessionStorage.setItem("notes", JSON.stringify(answer.notes));
  location.href = "/" + currentView() + "?" + answer.query;
}
