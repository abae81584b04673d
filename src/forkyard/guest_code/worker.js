// JavaScript and TypeScript, in one Node process that remembers. Started as `node -e`, from the directory of the context.
//
// Code is evaluated as in a console: `const` may be said again, `await` stands anywhere, and the value of the last
// expression is the result. Requests come on stdin and answers go to the descriptor in argv, one JSON object a line.
"use strict";
const { Session } = require("node:inspector");
const childProcess = require("node:child_process");
const fs = require("node:fs");
const nodeModule = require("node:module");
const readline = require("node:readline");
const util = require("node:util");
const vm = require("node:vm");

const answers = Number(process.argv[1]);
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

class Interrupted extends Error {}

function tellThrown(error) {
  if (error instanceof Interrupted) return say({ type: "exception", name: "Interrupted", value: "", traceback: "" });
  if (!(error instanceof Error)) return say({ type: "exception", name: "Uncaught", value: util.inspect(error), traceback: "" });
  const lines = String(error.stack).split("\n");
  const ours = lines.findIndex((line) => line.includes("at Session.post (node:inspector"));
  const traceback = (ours < 0 ? lines : lines.slice(0, ours)).join("\n");
  say({ type: "exception", name: error.name, value: error.message, traceback });
}

/** The value behind what the inspector says of it. */
function valueOf(remote) {
  if (remote.objectId === undefined) return remote.unserializableValue ? eval(remote.unserializableValue) : remote.value;
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

// Code that is evaluated has no `import` of its own: it is given ours. Strings and comments are left as they are.
const ASIDE = /("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\.)*`|\/\/.*|\/\*[^]*?\*\/)|(?<![\w$.])import\s*\(/g;
const STATIC = /^([ \t]*)import\s+(?:([\w$]+)\s*,?\s*)?(?:\*\s*as\s+([\w$]+)|(\{[^}]*\}))?\s*(?:from\s*)?(["'])([^"'\n]+)\5\s*;?/gm;

function withImports(code) {
  const asked = code.replace(STATIC, (whole, indent, one, all, some, _quote, from) => {
    if (/^\s*import\s*["']/.test(whole)) return `${indent}await __forkyard_import(${JSON.stringify(from)});`;
    const names = some && some.replace(/([\w$]+)\s+as\s+([\w$]+)/g, "$1: $2");
    const parts = [one && `${one} = $.default`, all && `${all} = $`, names && `${names} = $`].filter(Boolean);
    const loaded = `(await __forkyard_import(${JSON.stringify(from)}))`;
    return `${indent}const ${parts.map((part) => part.replace("$", () => loaded)).join(", ")};`;
  });
  return asked.replace(ASIDE, (whole, aside) => aside ?? "__forkyard_import(");
}

function withoutTypes(code) {
  try {
    return nodeModule.stripTypeScriptTypes(code);
  } catch (error) {
    if (error.code !== "ERR_UNSUPPORTED_TYPESCRIPT_SYNTAX") throw error;
    // Enums and namespaces are more than types: Bun knows how to make code of them.
    const options = '{loader: "ts", deadCodeElimination: false}'; // the last expression is not dead
    const program = `process.stdout.write(new Bun.Transpiler(${options}).transformSync(await Bun.stdin.text()))`;
    const done = childProcess.spawnSync("bun", ["-e", program], { input: code, encoding: "utf8" });
    if (done.status !== 0) throw error;
    return done.stdout;
  }
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
    else if (result.type !== "undefined") await show(valueOf(result), true);
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
hidden("display", (value) => show(value, false));
for (const event of ["uncaughtException", "unhandledRejection"]) process.on(event, (error) => console.error(error));
process.on("SIGINT", () => {}); // between runs
let last = Promise.resolve();
readline.createInterface({ input: process.stdin }).on("line", (line) => {
  last = last.then(() => run(JSON.parse(line)));
});
say({ type: "done" });
