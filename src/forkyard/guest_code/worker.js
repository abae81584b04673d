// JavaScript and TypeScript, in one Node process that remembers. Started as `node -e`, from the directory of the context.
//
// Code is evaluated as in a console: `const` may be said again, `await` stands anywhere, and the value of the last
// expression is the result. Requests and answers go through the descriptors in argv, one JSON object a line.
//
// All of this is started inside a block: the scope that code is evaluated in is that of a script, and every name there is
// the code's to take. So are those of the language, which are fetched before it comes.
const { Array, Buffer, Error, JSON, Number, Object, Promise, String, Symbol, SyntaxError, WeakSet } = globalThis;
const { console, eval: evaluated, process } = globalThis;
const { Session } = require("node:inspector");
const childProcess = require("node:child_process");
const fs = require("node:fs");
const net = require("node:net");
const nodeModule = require("node:module");
const readline = require("node:readline");
const util = require("node:util");
const vm = require("node:vm");

const [requests, answers] = process.argv.slice(1).map(Number);
const JSON_CHARS = 1 << 20;
const DISPLAY = Symbol.for("Jupyter.display");
const session = new Session();
session.connect();

const hidden = (name, value) => Object.defineProperty(globalThis, name, { value, configurable: true, writable: true });
const say = (answer) => {
  let rest = Buffer.from(JSON.stringify(answer) + "\n");
  while (rest.length) rest = rest.subarray(fs.writeSync(answers, rest));
};

// ── values ────────────────────────────────────────────────────────────────────────────────────────────────────────

async function bundleOf(value) {
  const own = typeof value === "object" && value !== null ? value[DISPLAY] : undefined;
  if (typeof own === "function") return await own.call(value);
  const bundle = { "text/plain": util.inspect(value, { depth: 4, maxArrayLength: 200, maxStringLength: 1 << 20 }) };
  if (typeof value === "object" && value !== null && (Array.isArray(value) || plain(value))) {
    try {
      const text = JSON.stringify(value);
      if (text.length <= JSON_CHARS) bundle["application/json"] = JSON.parse(text);
    } catch {} // it has no form in JSON
  }
  return bundle;
}

const plain = (value) => [Object.prototype, null].includes(Object.getPrototypeOf(value));

const show = async (value, main) => say({ type: "result", main, bundle: await bundleOf(value) });

/** What `display` gave back, to be waited for: as the last expression it is no value. */
const displayed = new WeakSet();

function display(value) {
  const shown = show(value, false);
  displayed.add(shown);
  return shown;
}

class Interrupted extends Error {}

function tellThrown(error) {
  if (error instanceof Interrupted) return say({ type: "exception", name: "Interrupted", value: "", traceback: "" });
  if (!(error instanceof Error)) return say({ type: "exception", name: "Uncaught", value: util.inspect(error), traceback: "" });
  const lines = String(error.stack).split("\n");
  const ours = lines.findIndex((line) => /at (Session\.post \(node:inspector|withoutTypes \(\[eval\])/.test(line));
  const traceback = (ours < 0 ? lines : lines.slice(0, ours)).join("\n");
  say({ type: "exception", name: error.name, value: error.message, traceback });
}

/** The value behind what the inspector says of it. */
function valueOf(remote) {
  if (remote.objectId === undefined) return remote.unserializableValue ? evaluated(remote.unserializableValue) : remote.value;
  let found;
  hidden("__forkyard_take", (value) => (found = value));
  session.post("Runtime.callFunctionOn", {
    objectId: remote.objectId,
    functionDeclaration: "function () { 'use strict'; __forkyard_take(this) }",
  });
  session.post("Runtime.releaseObject", { objectId: remote.objectId });
  delete globalThis.__forkyard_take;
  return found;
}

// ── code ──────────────────────────────────────────────────────────────────────────────────────────────────────────

// Code that is evaluated has no `import` of its own: it is given ours. What it exports is there for the next run like all
// else. Strings and comments are left as they are.
const ASIDE = /(?<aside>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\[^])*`|\/\/.*|\/\*[^]*?\*\/)/;
const DYNAMIC = /(?<dynamic>(?<![\w$.])import\s*\()/;
const STATIC =
  /(?<=^|;)(?<indent>[ \t]*)import(?![\w$])\s*(?:(?<one>[\w$]+)\s*,?\s*)?(?:\*\s*as\s+(?<all>[\w$]+)|(?<some>\{[^}]*\}))?\s*(?:from\s*)?(?<quote>["'])(?<from>[^"'\n]+)\k<quote>(?:\s*with\s*(?<how>\{[^}]*\}))?\s*;?/;
const DECLARED = /(?<=^|;)[ \t]*export\s+(?:default\s+)?(?=(?:async\s+)?function\s*\*?\s*[\w$]|class\s+(?!extends\s)[\w$]|const\s|let\s|var\s)/;
const LISTED = /(?<=^|;)[ \t]*export\s*\{[^}]*\}(?!\s*from)\s*;?/;
const VALUE = /(?<value>(?<=^|;)[ \t]*export\s+default\s)/;
const MODULE = new RegExp([ASIDE, DYNAMIC, STATIC, DECLARED, LISTED, VALUE].map((one) => one.source).join("|"), "gm");

function withImports(code) {
  return code.replace(MODULE, (...match) => {
    const { aside, dynamic, indent, one, all, some, from, how, value } = match.at(-1);
    if (aside !== undefined) return aside;
    if (dynamic !== undefined) return "__forkyard_import(";
    if (value !== undefined) return "0, "; // an expression, whatever it begins with
    if (from === undefined) return "";
    const loaded = `await __forkyard_import(${JSON.stringify(from)}${how ? `, { with: ${how} }` : ""})`;
    const names = some && some.replace(/([\w$]+)\s+as\s+([\w$]+)/g, "$1: $2");
    const parts = [one && `${one} = (${loaded}).default`, all && `${all} = ${loaded}`, names && `${names} = ${loaded}`];
    const asked = parts.filter(Boolean).join(", ");
    return `${indent}${asked ? `const ${asked}` : `void (${loaded})`};`;
  });
}

function withoutTypes(code) {
  let refused;
  if (nodeModule.stripTypeScriptTypes !== undefined) {
    try {
      return nodeModule.stripTypeScriptTypes(code);
    } catch (error) {
      if (error.code !== "ERR_UNSUPPORTED_TYPESCRIPT_SYNTAX") throw error;
      refused = error;
    }
  }
  // Enums and namespaces are more than types, and an older Node.js knows no types: Bun makes code of all that.
  const options = '{loader: "ts", deadCodeElimination: false}'; // the last expression is not dead
  const program = `process.stdout.write(new Bun.Transpiler(${options}).transformSync(await Bun.stdin.text()))`;
  const done = childProcess.spawnSync("bun", ["-e", program], { input: code, encoding: "utf8" });
  if (done.status === 0) return done.stdout;
  if (refused === undefined && done.error === undefined) refused = new SyntaxError(done.stderr.trim());
  if (refused === undefined && done.error.code !== "ENOENT") refused = new Error(`Bun cannot be started: ${done.error.message}`);
  throw refused ?? new Error(`TypeScript takes Node.js 22.13 or later, or Bun; this is Node.js ${process.version}, without Bun`);
}

const step = new vm.Script("__forkyard_step()");

/** Resolves to what the inspector says of it; rejects if it was interrupted. */
function evaluate(expression) {
  let settled;
  return new Promise((resolve, reject) => {
    const stopped = () => reject(new Interrupted());
    settled = () => process.removeListener("SIGINT", stopped);
    process.once("SIGINT", stopped); // while it waits; while it works, the script below is what is stopped
    hidden("__forkyard_step", () =>
      session.post("Runtime.evaluate", { expression, replMode: true, awaitPromise: true }, (error, answer) =>
        error ? stopped() : resolve(answer),
      ),
    );
    try {
      step.runInThisContext({ breakOnSigint: true });
    } catch {
      stopped();
    }
  }).finally(() => settled());
}

async function run({ code, language, env }) {
  const before = Object.fromEntries(Object.keys(env).map((name) => [name, process.env[name]]));
  Object.assign(process.env, env);
  try {
    const { result, exceptionDetails } = await evaluate(
      withImports(language === "typescript" ? withoutTypes(code) : code),
    );
    if (exceptionDetails) tellThrown(valueOf(exceptionDetails.exception ?? result));
    else if (result.type !== "undefined") {
      const value = valueOf(result);
      if (!displayed.has(value)) await show(value, true);
    }
  } catch (error) {
    tellThrown(error);
  }
  for (const [name, value] of Object.entries(before)) {
    if (value === undefined) delete process.env[name];
    else process.env[name] = value;
  }
  say({ type: "done" });
}

hidden("__forkyard_import", (from, options) => import(from, options));
hidden("require", nodeModule.createRequire(process.cwd() + "/"));
hidden("display", display);
for (const event of ["uncaughtException", "unhandledRejection"]) process.on(event, (error) => console.error(error));
process.on("SIGINT", () => {}); // between runs
let last = Promise.resolve();
const input = new net.Socket({ fd: requests, readable: true, writable: false });
readline.createInterface({ input }).on("line", (line) => {
  last = last.then(() => run(JSON.parse(line)));
});
say({ type: "done" });
