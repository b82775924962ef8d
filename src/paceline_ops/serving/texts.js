const text = document.getElementById("text");
const field = (name) => document.getElementById(name);
const isShown = (name) => !field(name).closest("[hidden]");

/* The words with their tags, or what else a model says of one text. */
const described = (answer) => {
  const parts = [];
  if (answer.error) parts.push(made("p", "bad", `Unreadable: ${answer.error}`));
  if (answer.text !== undefined) parts.push(made("p", "written", answer.text || "(empty answer)"));
  for (const guess of answer.guesses ?? []) parts.push(bars(guess.texts, guess.probabilities));
  if (answer.words) {
    const words = made("p", "words");
    answer.words.forEach((word, at) => {
      const tag = answer.labels[at];
      const shown = made("span", tag === "O" ? "" : "tagged", word);
      if (tag !== "O") shown.append(made("small", "", tag));
      words.append(shown, " ");
    });
    parts.push(words);
  } else if (answer.labels) {
    parts.push(bars(answer.labels, answer.probabilities));
  }
  return parts;
};

const lines = async function* (response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part);
  }
};

const ask = async () => {
  const mine = ++asked;
  const writes = isShown("tokens");
  const body = { texts: [text.value] };
  if (isShown("top-k")) body.top_k = Math.max(1, Math.round(Number(field("top-k").value)) || 1);
  if (writes) Object.assign(body, { tokens: Number(field("tokens").value), temperature: Number(field("temperature").value), stream: true });
  say(writes ? "Writing…" : "Sent…");
  try {
    const response = await fetch("predict", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    if (mine !== asked) return;
    if (!response.ok) return say((await response.json()).error, true);
    const row = made("li", "text");
    row.append(made("h2", "", text.value));
    answers.prepend(row);
    if (!writes) {
      row.append(...described((await response.json()).predictions[0]));
      return say("1 text answered.");
    }
    const written = made("p", "written");
    row.append(written);
    for await (const line of lines(response)) {
      if (line.text) written.textContent += line.text;
      if (line.error && mine === asked) say(line.error, true);
      if (line.done && !written.textContent) written.textContent = "(empty answer)";
      if (line.done && mine === asked) say("1 prompt answered.");
    }
  } catch (error) {
    if (mine === asked) say("The service does not answer; is it still running?", true);
  }
};

form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
