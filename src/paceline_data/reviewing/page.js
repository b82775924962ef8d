"use strict";
const at = (id) => document.getElementById(id);
const made = (name, className, text) => {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
};
const say = (text, bad) => {
  at("status").textContent = text;
  at("status").classList.toggle("bad", Boolean(bad));
};
const LISTED = 50; // classes in the dialog
const AHEAD = 3; // items whose pictures are loaded before they are shown
const KEPT = 40; // pictures
const POLL_MS = 3000;

let data = null;
let shown = []; // numbers of the items of the chosen kind
let place = 0; // in shown
let marked = 0; // which of an item's pictures
let sending = false;
const decisions = new Map();
const pictures = new Map(); // by file: a promise of its digest, and of its address or why there is none

const ask = async (path, body) => {
  const how = body === undefined ? {} : { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  let response;
  try {
    response = await fetch(path, how);
  } catch (error) {
    throw new Error("The review does not answer; is `paceline review` still running?");
  }
  const told = await response.json();
  if (!response.ok) throw Object.assign(new Error(told.error), { status: response.status });
  return told;
};

const merge = (news) => {
  for (const [file, decision] of Object.entries(news.decisions)) {
    if (decision) decisions.set(Number(file), decision);
    else decisions.delete(Number(file));
  }
  data.classes = [...data.there, ...news.new_classes];
  data.counts = news.counts;
  data.not_shown = news.not_shown;
  data.version = news.version;
  if (news.applied.length) end(news.applied);
};

// Pictures

const load = async (file) => {
  const response = await fetch(`pictures/${file}`);
  if (!response.ok) return response.json(); // of a digest, if it can be decided, and an error
  return { digest: response.headers.get("X-Digest"), address: URL.createObjectURL(await response.blob()) };
};
const picture = (file) => {
  const kept = pictures.get(file) || load(file);
  pictures.delete(file);
  pictures.set(file, kept);
  for (const [old, loaded] of pictures) {
    if (pictures.size <= KEPT) break;
    pictures.delete(old);
    loaded.then((each) => each.address && URL.revokeObjectURL(each.address), () => {});
  }
  kept.catch(() => pictures.delete(file));
  return kept;
};

// What is shown

const item = () => data.doubts[shown[place]];
const marked_file = () => item().files[marked];
const is_decided = (number) => data.doubts[number].files.some((file) => decisions.has(file));
const said = (file) => {
  const decision = decisions.get(file);
  if (!decision) return "";
  if (decision.action === "move") return `→ ${data.classes[decision.to] ?? "another class"}`;
  return decision.action === "keep" ? "kept" : "set aside";
};

const draw_picture = (file, number) => {
  const button = made("button");
  button.type = "button";
  button.setAttribute("aria-pressed", String(number === marked));
  const frame = made("div", "none", "Loading…");
  button.append(
    frame,
    made("span", "class", data.classes[data.class_of[file]] ?? ""),
    made("span", "muted", data.files[file]),
    made("span", "decision", said(file)),
  );
  button.addEventListener("click", () => mark(number));
  picture(file).then((loaded) => {
    if (!loaded.address) {
      frame.textContent = `Cannot be shown: ${loaded.error}`;
      return;
    }
    const image = made("img");
    image.alt = data.files[file];
    image.src = loaded.address;
    frame.replaceWith(image);
  }, () => { frame.textContent = "The review does not answer."; });
  return button;
};

const draw = () => {
  const decided = shown.filter(is_decided).length;
  const counts = data.counts; // of all reviewers
  const others = data.not_shown ? `; ${data.not_shown} of these not shown here: reload the page` : "";
  at("summary").textContent = `${counts.move} to move, ${counts.aside} to set aside, ${counts.keep} kept${others}`;
  at("effect").textContent = `${counts.move} to move to another class, ${counts.aside} to set aside.`;
  at("review").disabled = counts.move + counts.aside === 0;
  at("progress").textContent = shown.length ? `${place + 1} of ${shown.length}, ${decided} decided` : "";
  for (const button of at("actions").children) button.disabled = !shown.length;
  if (!shown.length) {
    at("why").textContent = "There is nothing to review.";
    at("pictures").replaceChildren();
    return;
  }
  const now = item();
  at("why").textContent = `${data.kinds[now.kind]}: ${now.why}`;
  const had_focus = at("pictures").contains(document.activeElement);
  at("pictures").replaceChildren(...now.files.map(draw_picture));
  if (had_focus) at("pictures").children[marked].focus();
  const suggestion = suggested();
  at("suggest").hidden = !suggestion;
  if (suggestion) at("suggest").firstChild.textContent = suggestion.to === null ? "As suggested: set aside" : `As suggested: ${data.classes[suggestion.to]}`;
  at("other").hidden = now.files.length < 2;
  at("undecide").disabled = !decisions.has(marked_file());
  for (let ahead = 1; ahead <= AHEAD && place + ahead < shown.length; ahead += 1) data.doubts[shown[place + ahead]].files.forEach(picture);
};

// A suggestion is about the first picture of an item.
const suggested = () => {
  const now = item();
  if (marked !== 0) return null;
  if (now.suggested !== null) return { action: "move", to: now.suggested };
  return now.aside ? { action: "aside", to: null } : null;
};
const mark = (number) => {
  marked = number;
  draw();
};
const go = (to) => {
  if (to < 0 || to >= shown.length) return;
  place = to;
  marked = 0;
  draw();
};
const next_undecided = () => {
  for (let step = 1; step <= shown.length; step += 1) {
    const to = (place + step) % shown.length;
    if (!is_decided(shown[to])) return go(to);
  }
  draw();
  say("All are decided.");
};
const choose = () => {
  const kind = Number(at("kinds").value);
  shown = data.doubts.map((_, number) => number).filter((number) => kind < 0 || data.doubts[number].kind === kind);
  place = Math.max(0, shown.findIndex((number) => !is_decided(number)));
  marked = 0;
  draw();
};

// Decisions

const decide = async (action, to = null) => {
  if (sending || !shown.length) return;
  sending = true;
  const file = marked_file();
  const mine = shown[place];
  try {
    const { digest, error } = await picture(file);
    if (!digest) throw new Error(`It cannot be decided here: ${error}`);
    merge(await ask("decide", { file, action, to, digest, before: decisions.get(file) ?? null, since: data.version }));
    say(`${data.files[file]}: ${said(file) || "undecided"}`);
    if (shown[place] === mine && action !== "undecided") next_undecided();
    else draw();
  } catch (error) {
    say(error.message, true);
    if (error.status === 409) {
      pictures.delete(file);
      await news();
      draw();
    }
  } finally {
    sending = false;
  }
};
const suggest = () => {
  const suggestion = suggested();
  if (suggestion) decide(suggestion.action, suggestion.to);
};

// A number is that of a class; text names a new one.
const class_row = (text, to) => {
  const row = made("li");
  const button = made("button", "", text);
  button.type = "button";
  button.addEventListener("click", () => {
    at("classes").close();
    decide("move", to);
  });
  row.append(button);
  return row;
};
const list_classes = () => {
  const typed = at("filter").value.trim();
  const wanted = typed.toLowerCase();
  const numbers = data.classes.map((_, number) => number);
  const rank = (number) => {
    const name = data.classes[number].toLowerCase();
    return name === wanted ? 0 : name.startsWith(wanted) ? 1 : name.includes(wanted) ? 2 : 3;
  };
  const own = data.class_of[marked_file()];
  const found = numbers.filter((number) => number !== own && rank(number) < 3).sort((one, two) => rank(one) - rank(two) || one - two);
  const rows = found.slice(0, LISTED).map((number) => class_row(data.classes[number], number));
  if (typed && !data.classes.includes(typed)) rows.push(class_row(`New class: ${typed}`, typed));
  at("matches").replaceChildren(...rows);
};
const choose_class = () => {
  at("filter").value = "";
  list_classes();
  at("classes").showModal();
  at("filter").focus();
};

// The plan of all reviewers

const news = async () => {
  try {
    merge(await ask(`news?since=${data.version}`));
    return true;
  } catch (error) {
    say(error.message, true);
    return false;
  }
};
let ended = false;
const end = (lines) => {
  if (ended) return;
  ended = true;
  shown = [];
  draw();
  at("why").textContent = "The plan has been applied.";
  at("review").disabled = at("kinds").disabled = true;
  say(lines.join("\n"));
  at("why").focus();
};
const poll = async () => {
  if (!document.hidden && !sending && !ended) {
    const before = data.version;
    if (await news() && data.version !== before && !ended) draw();
  }
  if (!ended) setTimeout(poll, POLL_MS);
};
const apply = async () => {
  at("confirm").close();
  say("Applying the plan…");
  sending = true;
  try {
    merge(await ask("apply", { version: data.version }));
  } catch (error) {
    await news();
    draw();
    say(error.message, true);
  } finally {
    sending = false;
  }
};

const start = async () => {
  try {
    data = await ask("doubts");
    data.there = data.classes;
  } catch (error) {
    at("why").textContent = error.message;
    return;
  }
  const all = made("option", "", `everything (${data.doubts.length})`);
  all.value = "-1";
  at("kinds").append(all, ...data.kinds.map((name, number) => {
    const option = made("option", "", `${name} (${data.doubts.filter((each) => each.kind === number).length})`);
    option.value = String(number);
    return option;
  }));
  at("notes").append(...data.notes.map((note) => made("li", "", note)));
  merge(data);
  if (!ended) choose();
  setTimeout(poll, POLL_MS);
};

const buttons = {
  keep: () => decide("keep"), suggest, move: choose_class, aside: () => decide("aside"), undecide: () => decide("undecided"),
  other: () => mark((marked + 1) % item().files.length), previous: () => go(place - 1), next: () => go(place + 1),
};
const keys = { k: "keep", s: "suggest", m: "move", a: "aside", u: "undecide", o: "other", arrowleft: "previous", arrowright: "next" };
for (const [name, act] of Object.entries(buttons)) at(name).addEventListener("click", act);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || document.querySelector("dialog[open]")) return;
  if (event.target.closest("select, input")) return;
  const button = at(keys[event.key.toLowerCase()] ?? "");
  if (!button || button.disabled || button.hidden) return;
  event.preventDefault();
  button.click();
});
at("kinds").addEventListener("change", choose);
at("filter").addEventListener("input", list_classes);
at("filter").addEventListener("keydown", (event) => {
  if (event.key === "Enter") at("matches").querySelector("button")?.click();
});
at("review").addEventListener("click", () => at("confirm").showModal());
at("apply").addEventListener("click", apply);
for (const button of document.querySelectorAll(".close")) button.addEventListener("click", () => button.closest("dialog").close());
start();
