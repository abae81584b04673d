// Calls of the published `e2b` package of npm, each with what a caller may rely on. Prints a line of JSON for each: its name,
// and what went wrong if anything did. With `--list` it prints the names alone, the oldest version that has each, and whether
// it needs a real machine.
import { CALLS, Yard } from './registry.js'
import './sandboxes.js'
import './commands.js'
import './files.js'
import './templates.js'
import './machines.js'
import './sleep.js'

function older(one, other) {
  const [a, b] = [one, other].map((version) => version.split('.').map(Number))
  for (let n = 0; n < 3; n++) if ((a[n] ?? 0) !== (b[n] ?? 0)) return (a[n] ?? 0) < (b[n] ?? 0)
  return false
}

async function main() {
  if (process.argv.includes('--list')) {
    console.log(JSON.stringify(CALLS.map(([name, since, , vm]) => [name, since, vm])))
    return
  }
  const e2b = await import('e2b')
  const { readFileSync } = await import('node:fs')
  const version = JSON.parse(readFileSync(new URL('../node_modules/e2b/package.json', import.meta.url))).version
  const yard = new Yard(e2b)
  for (const [name, since, check, vm] of CALLS) {
    if (older(version, since) || (vm && !process.env.COMPAT_VM)) continue
    const began = Date.now()
    let wrong = null
    try {
      await check(yard)
    } catch (error) {
      wrong = String(error?.stack ?? error)
    }
    console.log(JSON.stringify({ call: name, wrong, seconds: (Date.now() - began) / 1000 }))
  }
}

main().then(() => process.exit(0))
