// Sources -> ../page: index.html and style.css as they are, and app.js, bundled. Whoever has no node can still check
// that the page is fresh: app.js begins with the hash of the sources and the hash of all that follows in app.js.

import { createHash } from "node:crypto";
import { copyFileSync, existsSync, mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const page = join(here, "..", "page");
const sources = [
  "build.mjs", "index.html", "package-lock.json", "package.json", "style.css", "tsconfig.json",
  ...readdirSync(join(here, "src")).map((name) => `src/${name}`),
].sort();

const hash = createHash("sha256");
for (const name of sources) {
  const content = readFileSync(join(here, name));
  hash.update(`${name}\n${content.length}\n`).update(content);
}

const { outputFiles, metafile } = await build({
  absWorkingDir: here, entryPoints: ["src/main.ts"], bundle: true, minify: true, format: "iife", target: "es2022",
  charset: "utf8", legalComments: "none", write: false, metafile: true, logLevel: "warning",
});

// What was bundled asks to be named wherever it goes: each licence once, with the packages it covers.
const licences = new Map();
for (const input of Object.keys(metafile.inputs)) {
  const [folder, name] = input.match(/^node_modules\/((?:@[^/]+\/)?[^/]+)/) ?? [];
  if (!folder) continue;
  const file = ["LICENSE", "LICENSE.md", "license"].map((one) => join(here, folder, one)).find(existsSync);
  const { version, license } = JSON.parse(readFileSync(join(here, folder, "package.json"), "utf8"));
  const text = file ? readFileSync(file, "utf8").trim() : `Licence: ${license}`;
  licences.set(text, (licences.get(text) ?? new Set()).add(`${name} ${version}`));
}
const notices = [...licences].map(([text, names]) => `${[...names].sort().join(", ")}\n\n${text}`).sort();
const code = outputFiles[0].text.trimEnd();
const body = `${code}\n/* With parts of:\n\n${notices.join("\n\n----\n\n").replaceAll("*/", "* /")}\n*/\n`;

mkdirSync(page, { recursive: true });
const bundle = createHash("sha256").update(body).digest("hex");
writeFileSync(join(page, "app.js"), `/* sources ${hash.digest("hex")} bundle ${bundle} */\n${body}`);
for (const name of ["index.html", "style.css"]) copyFileSync(join(here, name), join(page, name));
console.log(`page/app.js: ${(body.length / 1024).toFixed(0)} KB from ${sources.length} sources`);
