// The command line of the package, as people type it.
import { execFile } from 'node:child_process'
import { writeFileSync } from 'node:fs'
import { dirname, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { assert, call } from './registry.js'

const SINCE = { since: '0.1.63' }
const DOMAIN = `cli-${process.pid}.example.com`

// What it prints, and the code it ends with.
function typed(...args) {
  const main = join(dirname(fileURLToPath(import.meta.url)), '..', 'node_modules', process.env.COMPAT_PACKAGE, 'cli.mjs')
  const env = { ...process.env, HOME: process.env.COMPAT_DIR }
  return new Promise((done) => {
    execFile(process.execPath, [main, ...args], { env, timeout: 120_000 }, (error, out, err) => {
      done({ code: error?.code ?? 0, out, text: out + err })
    })
  })
}

async function prints(pattern, ...args) {
  const { code, text } = await typed(...args)
  assert.equal(code, 0, text)
  const found = text.match(pattern)
  assert(found, `${pattern} is not in ${text}`)
  return found[1] ?? found[0]
}

call('cli: whoami', async () => {
  await prints(/Account ID: \S+/, 'whoami')
}, SINCE)

call('cli: vm create, list, exec, delete', async () => {
  const vm = await prints(/VM ID: ([a-z0-9]{20})/, 'vm', 'create', '--exec', 'echo made-$((6 * 7))')
  await prints(new RegExp(`${vm} +running`), 'vm', 'list')
  await prints(/said 42[^]*Exit code: 3/, 'vm', 'exec', vm, 'echo said $((6 * 7)); exit 3')
  await prints(/sandbox.running/, 'logs', '--vm', vm)
  await prints(/deleted/, 'vm', 'delete', vm)
  const gone = await typed('vm', 'exec', vm, 'true')
  assert.equal(gone.code, 1)
  assert.match(gone.text, /VM_DELETED/)
}, SINCE)

call('cli: vm snapshot list, get, rename, boot, delete', async (y) => {
  const { snapshotId } = await y.vm.snapshot()
  await prints(snapshotId, 'vm', 'snapshot', 'list')
  await prints(snapshotId, 'vm', 'snapshot', 'get', snapshotId)
  await prints(/./, 'vm', 'snapshot', 'rename', snapshotId, '--name', `cli-${process.pid}`)
  const vm = await prints(/VM ([a-z0-9]{20}) created/, 'vm', 'snapshot', 'boot', snapshotId)
  await prints(/deleted/, 'vm', 'delete', vm)
  await prints(/./, 'vm', 'snapshot', 'delete', snapshotId)
}, SINCE)

call('cli: git create, list, delete', async () => {
  const repo = await prints(/Repo ID: (\S+)/, 'git', 'create', '--name', `cli-${process.pid}`)
  await prints(repo, 'git', 'list')
  await prints(/deleted/i, 'git', 'delete', repo)
}, SINCE)

call('cli: domains verify, complete, map, mappings, unmap', async (y) => {
  const { out } = await typed('domains', 'verify', DOMAIN, '--json')
  const { record } = JSON.parse(out.slice(out.indexOf('{')))
  writeFileSync(`${process.env.COMPAT_ZONE}/${record.name}`, record.value)
  await prints(DOMAIN, 'domains', 'complete', '--domain', DOMAIN)
  await prints(DOMAIN, 'domains', 'list')
  await prints(DOMAIN, 'domains', 'map', DOMAIN, '--vm-id', y.vmId, '--vm-port', '8123')
  await prints(y.vmId, 'domains', 'mappings')
  await prints(/deleted/, 'domains', 'unmap', DOMAIN)
}, SINCE)

call('cli: run', async () => {
  await prints(/"result": 42/, 'run', '--code', 'export default () => 6 * 7', '--json')
  const run = await prints(/Run ID: (\S+)/, 'run', '--code', "export default () => { console.log('told') }")
  await prints(/told/, 'logs', '--run', run)
}, SINCE)

call('cli: logs of all', async (y) => {
  await prints(/sandbox\./, 'logs', '--resource-type', 'vm')
}, SINCE)

call('cli: deploy: not served', async () => {
  const { code, text } = await typed('deploy', '--code', 'export default 1')
  assert.equal(code, 1)
  assert.match(text, /SERVICE_UNAVAILABLE/)
}, SINCE)
