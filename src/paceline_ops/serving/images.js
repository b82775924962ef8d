const files = document.getElementById("files");
const drop = document.getElementById("drop");

const drawnBoxes = (image, boxes) => {
  const space = "http://www.w3.org/2000/svg";
  const drawing = document.createElementNS(space, "svg");
  drawing.setAttribute("viewBox", `0 0 ${image.naturalWidth} ${image.naturalHeight}`);
  drawing.setAttribute("aria-hidden", "true");
  for (const [left, top, right, bottom] of boxes) {
    const box = document.createElementNS(space, "rect");
    const sides = { x: left, y: top, width: right - left, height: bottom - top };
    for (const [name, value] of Object.entries(sides)) box.setAttribute(name, value);
    drawing.append(box);
  }
  return drawing;
};

const shown = (file, answer) => {
  const row = made("li");
  const picture = made("div", "picture");
  const image = made("img");
  image.alt = file.name;
  image.src = URL.createObjectURL(file);
  image.addEventListener("load", () => {
    if (answer.overlay) {
      const overlay = made("img", "overlay");
      overlay.alt = "";
      overlay.src = answer.overlay;
      picture.append(overlay);
    }
    if (answer.boxes) picture.append(drawnBoxes(image, answer.boxes));
    URL.revokeObjectURL(image.src);
  });
  image.addEventListener("error", () => image.remove());
  picture.append(image);
  const said = made("div");
  said.append(made("h2", "", file.name));
  if (answer.error) {
    said.append(made("p", "bad", `Unreadable: ${answer.error}`));
  } else if (answer.numbers) {
    for (const [name, number] of Object.entries(answer.numbers)) said.append(made("p", "", `${name}: ${number}`));
  } else if (!answer.labels.length) {
    said.append(made("p", "", "Nothing was found."));
  }
  if (answer.overlay && !answer.boxes) said.append(made("p", "muted", "Shares of the pixels"));
  said.append(bars(answer.labels, answer.probabilities));
  row.append(picture, said);
  return row;
};

const ask = async (chosen) => {
  const mine = ++asked;
  const bytes = chosen.reduce((sum, file) => sum + file.size, 0);
  if (!chosen.length) return;
  if (chosen.length > most.images) return say(`${chosen.length} images; at most ${most.images} are answered at once.`, true);
  if (bytes > most.bytes) return say(`${(bytes / 2 ** 20).toFixed(1)} MiB; at most ${most.bytes / 2 ** 20} MiB are taken at once.`, true);
  const body = new FormData();
  for (const file of chosen) body.append("images", file);
  const choice = document.getElementById("top-k");
  const labels = Math.max(1, Math.round(Number(choice.value)) || 1);
  say(chosen.length === 1 ? "Asking about one image…" : `Asking about ${chosen.length} images…`);
  try {
    const response = await fetch(choice.closest("[hidden]") ? "predict" : `predict?top_k=${labels}`, { method: "POST", body });
    const told = await response.json();
    if (mine !== asked) return;
    if (!response.ok) return say(told.error, true);
    answers.replaceChildren(...told.predictions.map((answer, number) => shown(chosen[number], answer)));
    const unreadable = told.predictions.filter((answer) => answer.error).length;
    const answered = chosen.length - unreadable;
    say((answered === 1 ? "1 image answered" : `${answered} images answered`) + (unreadable ? `, ${unreadable} unreadable.` : "."));
  } catch (error) {
    if (mine === asked) say("The service does not answer; is it still running?", true);
  }
};

files.addEventListener("change", () => ask([...files.files]));
document.getElementById("top-k").addEventListener("change", () => ask([...files.files]));
form.addEventListener("submit", (event) => { event.preventDefault(); ask([...files.files]); });
for (const name of ["dragenter", "dragover"]) drop.addEventListener(name, () => drop.classList.add("over"));
for (const name of ["dragleave", "drop"]) drop.addEventListener(name, () => drop.classList.remove("over"));
