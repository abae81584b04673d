// Calls of the published `freestyle` and `freestyle-sandboxes` packages, each with what a caller may rely on. Prints a line of
// JSON for each: its name, and what went wrong if anything did. With `--list` it prints the names alone, the oldest version
// that has each, and whether it needs a real machine.
import { readFileSync } from 'node:fs'
import { CALLS, Yard, older } from './registry.js'
import './vms.js'
import './inside.js'
import './sleep.js'
import './snapshots.js'
import './layers.js'
import './git.js'
import './identities.js'
import './domains.js'
import './rest.js'
import './cli.js'
import './specs.js'
import './snippets.js'
import './end.js'

async function main() {
  if (process.argv.includes('--list')) {
    console.log(JSON.stringify(CALLS.map(([name, since, , vm]) => [name, since, vm])))
    return
  }
  globalThis.WebSocket = (await import('ws')).WebSocket
  const name = process.env.COMPAT_PACKAGE
  const { version } = JSON.parse(readFileSync(new URL(`../node_modules/${name}/package.json`, import.meta.url)))
  const yard = new Yard(await import(name), version)
  for (const [call, since, check, vm] of CALLS) {
    if (older(version, since) || (vm ? !yard.vm_tier : process.env.COMPAT_VM === 'only')) continue
    const began = Date.now()
    let wrong = null
    try {
      await check(yard)
    } catch (error) {
      wrong = String(error?.stack ?? error)
    }
    console.log(JSON.stringify({ call, wrong, seconds: (Date.now() - began) / 1000 }))
  }
}

main().then(() => process.exit(0))
