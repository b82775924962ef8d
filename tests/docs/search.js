// Ask the site's own search: node search.js SITE QUESTION…; prints, for each question, the pages found, best first.
const fs = require("fs"), path = require("path"), vm = require("vm");
const [site, ...questions] = process.argv.slice(2);
const workers = path.join(site, "assets/javascripts/workers");
const worker = fs.readdirSync(workers).find(name => name.endsWith(".js"));
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
let receive, answered;
const page = {
  console, setTimeout, URL, location: { href: "http://localhost/" }, importScripts: () => {},
  addEventListener: (_, listener) => { receive = listener; }, postMessage: message => answered(message),
};
page.self = page.globalThis = page.window = page;
vm.runInContext(fs.readFileSync(path.join(workers, worker), "utf8"), vm.createContext(page));
const ask = data => new Promise(done => { answered = done; receive({ data }); });
(async () => {
  await ask({ type: 0, data: { ...index, options: { suggest: false } } }); // 0: set up, 2: query
  const found = {};
  for (const question of questions) {
    const { data } = await ask({ type: 2, data: question });
    found[question] = data.items.map(([best]) => best.location.replace(/#.*/, ""));
  }
  console.log(JSON.stringify(found));
})();
