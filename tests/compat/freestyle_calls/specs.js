// Specs, builds and units: what only a real machine can show.
import { assert, call, fails, until } from './registry.js'

const VM = { vm: true }

async function built(y, spec, more = {}) {
  const { vm } = await y.fs.vms.create({ spec, ...more })
  return vm
}

call('VmSpec: additionalFiles, groups, users', async (y) => {
  const vm = await built(y, new y.sdk.VmSpec()
    .additionalFiles({
      '/opt/hello.sh': { content: '#!/bin/sh\necho hello\n', executable: true },
      '/opt/bytes': { content: Buffer.from([0, 255]).toString('base64'), encoding: 'base64' },
    })
    .groups([{ name: 'crew' }])
    .users([{ name: 'bob', uid: 4321, groups: ['crew'] }])
    .workdir('/srv/app'))
  assert.equal((await vm.exec('/opt/hello.sh; stat -c %s /opt/bytes; pwd')).stdout, 'hello\n2\n/srv/app\n')
  assert.equal((await vm.exec('id -u bob; id -Gn bob')).stdout, '4321\nbob crew\n')
  assert.equal((await vm.user({ username: 'bob' }).exec('id -un; pwd')).stdout, 'bob\n/home/bob\n')
  await vm.delete()
}, VM)

call('VmSpec.runCommands, snapshot: layers are built once', async (y) => {
  const spec = () => new y.sdk.VmSpec()
    .runCommands('date +%N > /opt/built', 'echo two >> /opt/built')
    .snapshot()
    .additionalFiles({ '/opt/own': { content: 'x' } })
  const [first, second] = [await built(y, spec()), await built(y, spec())]
  const read = async (vm) => (await vm.exec('cat /opt/built /opt/own')).stdout
  assert.match(await read(first), /^\d+\ntwo\nx$/)
  assert.equal(await read(first), await read(second))
  await Promise.all([first.delete(), second.delete()])
}, VM)

call('VmSpec.waitFor, systemdService', async (y) => {
  const vm = await built(y, new y.sdk.VmSpec()
    .systemdService({
      name: 'web',
      bash: 'mkdir -p /srv/web && cd /srv/web && echo page > index.html && exec python3 -m http.server 3000',
    })
    .waitFor('curl -sf localhost:3000/index.html')
    .snapshot())
  assert.equal((await vm.exec('curl -s localhost:3000/index.html')).stdout, 'page\n')
  y.web = vm
}, VM)

call('systemd.list', async (y) => {
  assert((await y.web.systemd.list()).services.some((one) => one.name === 'web'))
}, VM)

call('systemd.getStatus', async (y) => {
  const found = await y.web.systemd.getStatus({ serviceId: 'web' })
  assert.deepEqual([found.name, found.activeState, found.subState], ['web', 'active', 'running'])
}, VM)

call('systemd.create', async (y) => {
  const made = await y.web.systemd.create({
    name: 'ticker',
    mode: 'service',
    exec: ['while true; do echo tick $WHO; sleep 1; done'],
    env: { WHO: 'me' },
    restartPolicy: { policy: 'always', restartSec: 1 },
  })
  assert.deepEqual([made.success, made.serviceName], [true, 'ticker'])
  await fails('SERVICE_ALREADY_EXISTS', () => y.web.systemd.create({ name: 'ticker', mode: 'service', exec: ['true'] }))
}, VM)

call('systemd.getLogs', async (y) => {
  await until(async () => {
    const { logs } = await y.web.systemd.getLogs({ serviceId: 'ticker', lines: 5 })
    return logs.some((one) => one.message === 'tick me' && Date.parse(one.timestamp) > 0)
  })
}, VM)

call('systemd.stop, start, restart', async (y) => {
  const services = [{ id: 'ticker' }]
  const state = async () => (await y.web.systemd.getStatus({ serviceId: 'ticker' })).activeState
  assert.equal((await y.web.systemd.stop({ services })).results[0].success, true)
  assert.equal(await state(), 'inactive')
  await y.web.systemd.start({ services })
  assert.equal(await state(), 'active')
  await y.web.systemd.restart({ services })
  assert.equal(await state(), 'active')
}, VM)

call('systemd.service', async (y) => {
  const ticker = y.web.systemd.service('ticker')
  assert.equal((await ticker.status()).activeState, 'active')
  await ticker.stop()
}, VM)

call('systemd.create: names as units have them', async (y) => {
  for (const name of ['MyService', 'dev.server@1']) {
    const made = await y.web.systemd.create({ name, mode: 'service', exec: ['exec sleep 600'] })
    assert.deepEqual([made.success, made.serviceName], [true, name])
    const found = await y.web.systemd.getStatus({ serviceId: name })
    assert.deepEqual([found.name, found.activeState], [name, 'active'])
    assert.equal((await y.web.exec(`systemctl is-enabled '${name}.service'`)).stdout, 'enabled\n')
    await y.web.systemd.delete({ serviceId: name })
  }
  await fails('SERVICE_NAME_INVALID_CHARS', () => y.web.systemd.create({ name: 'a b', mode: 'service', exec: ['true'] }))
}, VM)

call('observability.streamLogs: of a service', async (y) => {
  const stop = new AbortController()
  const seen = []
  setTimeout(() => stop.abort(), 30_000).unref()
  await y.web.systemd.start({ services: [{ id: 'ticker' }] })
  for await (const entry of y.fs.observability.streamLogs({ vmId: y.web.vmId, vmService: 'ticker', signal: stop.signal })) {
    if (entry.message === 'tick me') seen.push(Date.parse(entry.timestamp))
    if (seen.length > 2) break
  }
  assert(Math.abs(seen.at(-1) - Date.now()) < 60_000, seen)
}, { vm: true, since: '0.1.52' })

call('VmSpec: remainAfterExit, patchedServices', async (y) => {
  const raw = {
    systemd: {
      services: [
        { name: 'once', mode: 'oneshot', exec: ['echo done'], remainAfterExit: false },
        { name: 'sleeper', mode: 'service', exec: ['exec sleep 600'] },
      ],
      patchedServices: [{ name: 'sleeper', env: { PATCHED: "it's 100%" }, restartPolicy: { policy: 'always', restartSec: 7 } }],
    },
  }
  const vm = await built(y, y.sdk.VmSpec.fromRaw ? y.sdk.VmSpec.fromRaw(raw) : new y.sdk.VmSpec(raw))
  const shown = async (unit, property) => (await vm.exec(`systemctl show -P ${property} ${unit}`)).stdout.trim()
  assert.equal(await shown('once', 'ActiveState'), 'inactive')
  assert.match(await shown('sleeper', 'Environment'), /PATCHED=it's 100%/)
  assert.equal(await shown('sleeper', 'RestartUSec'), '7s')
  await vm.delete()
}, { vm: true })

call('systemd.delete', async (y) => {
  await y.web.systemd.delete({ serviceId: 'ticker' })
  await fails('SERVICE_NOT_FOUND', () => y.web.systemd.getStatus({ serviceId: 'ticker' }))
}, VM)

call('vm.fork: what runs goes on in the forks', async (y) => {
  const { forks } = await y.web.fork({ count: 2 })
  for (const { vm } of forks) assert.equal((await vm.exec('curl -s localhost:3000/index.html')).stdout, 'page\n')
  await Promise.all(forks.map(({ vm }) => vm.delete()))
}, VM)

call('vm.suspend: memory is kept', async (y) => {
  await y.web.suspend()
  assert.equal((await y.web.exec('curl -s localhost:3000/index.html')).stdout, 'page\n')
  await y.web.delete()
}, VM)

call('VmSpec: a command that fails', async (y) => {
  const spec = new y.sdk.VmSpec().runCommands('echo before; echo broken >&2; exit 7')
  const error = await fails('VM_SETUP_FAILED', () => y.fs.vms.create({ spec }))
  assert.match(error.body.snapshotId, /^sc-/)
  assert(JSON.stringify(error.body.diagnostics).includes('broken'))
  const { vm } = await y.fs.vms.create({ snapshotId: error.body.snapshotId })
  assert.equal((await vm.exec('echo alive')).stdout, 'alive\n')
  await vm.delete()
  await y.fs.vms.snapshots.delete({ snapshotId: error.body.snapshotId })
}, VM)

call('snapshots.ensure: spec', async (y) => {
  const wanted = () => ({ spec: new y.sdk.VmSpec().runCommands('echo ensured > /opt/ensured') })
  const { snapshotId } = await y.fs.vms.snapshots.ensure(wanted())
  assert.equal((await y.fs.vms.snapshots.ensure(wanted())).snapshotId, snapshotId)
  const { vm } = await y.fs.vms.create({ snapshotId })
  assert.equal((await vm.exec('cat /opt/ensured')).stdout, 'ensured\n')
  await vm.delete()
}, VM)

call('snapshots.ensure: template', async (y) => {
  const template = new y.sdk.VmTemplate({ additionalFiles: { '/opt/template': { content: 'x' } } })
  assert.match((await y.fs.vms.snapshots.ensure({ template })).snapshotId, /^sc-/)
}, VM)

call('vms.create: logger, while it is built', async (y) => {
  const lines = []
  const { vm } = await y.fs.vms.create({
    spec: new y.sdk.VmSpec().runCommands(`sleep 7; echo ${y.version}`).snapshot(),
    logger: (line) => lines.push(line),
  })
  y.slow = vm
}, { vm: true, since: '0.1.52' })

call('vm.getBuild: of a slow build', async (y) => {
  const build = await y.slow.getBuild()
  assert.equal((build.state ? build : await build.get()).state, 'succeeded')
  await y.slow.delete()
}, { vm: true, since: '0.1.52' })

call('with-python: runCode', async (y) => {
  const { VmPython } = await import('@freestyle-sh/with-python')
  const vm = await built(y, new y.sdk.VmSpec().with('python', new VmPython()))
  const done = await vm.python.runCode('import json; print(json.dumps({"n": 6 * 7}))')
  assert.deepEqual(done.result, { n: 42 })
  await vm.delete()
}, VM)

call('with-nodejs: runCode', async (y) => {
  const { VmNodeJs } = await import('@freestyle-sh/with-nodejs')
  const vm = await built(y, new y.sdk.VmSpec().with('js', new VmNodeJs({ version: '26' })))
  const done = await vm.js.runCode('console.log(JSON.stringify({ n: 6 * 7 }))')
  assert.deepEqual(done.result, { n: 42 })
  y.node = vm
}, VM)

call('with-nodejs: install', async (y) => {
  await y.node.exec('mkdir -p /srv/js')
  const done = await y.node.js.install({ directory: '/srv/js', deps: { 'is-number': '7.0.0' } })
  assert(done.success, done.stderr)
  const ran = await y.node.js.runCode({ code: "console.log(JSON.stringify(require('is-number')(7)))", workdir: '/srv/js' })
  assert.equal(ran.result, true)
  await y.node.delete()
}, VM)

call('VmBaseImage: an image of a runtime', async (y) => {
  const vm = await built(y, new y.sdk.VmSpec().baseImage(new y.sdk.VmBaseImage().from('python:slim').runCommands('python3 --version > /opt/which')))
  assert.match((await vm.exec('cat /opt/which; systemctl is-system-running')).stdout, /^Python 3/)
  await vm.delete()
}, VM)

call('VmSpec: users of the system, and groups that are not there', async (y) => {
  const users = [{ name: 'svc', system: true }, { name: 'ann', groups: ['nobodyhas'] }]
  const vm = await built(y, new y.sdk.VmSpec().users(users))
  const shown = await vm.exec('getent passwd svc | cut -d: -f6,7; id -Gn ann')
  assert.equal(shown.stdout, '/:/usr/sbin/nologin\nann nobodyhas\n')
  await vm.delete()
}, VM)

call('VmBaseImage: Bun, as its builder writes it', async (y) => {
  const image = new y.sdk.VmBaseImage()
    .from('debian:trixie-slim')
    .runCommands('curl -fsSL https://bun.sh/install | BUN_INSTALL=/opt/bun bash', 'echo image > /opt/image')
  const vm = await built(y, new y.sdk.VmSpec().baseImage(image))
  const done = await vm.exec(`cat /opt/image; /opt/bun/bin/bun -e "console.log(1 + 1)"`)
  assert.equal(done.stdout, 'image\n2\n')
  await vm.delete()
}, VM)

call('vms.create: git, a hosted repository', async (y) => {
  const { repoId, repo } = await y.fs.git.repos.create({
    import: { type: 'files', files: { 'README.md': '# Hosted\n' }, commitMessage: 'First' },
  })
  const { vm } = await y.fs.vms.create({ git: { repos: [{ repo: repoId, path: '/work/app' }] } })
  assert.equal((await vm.exec('cat /work/app/README.md')).stdout, '# Hosted\n')
  const pushed = await vm.exec(
    'cd /work/app && git config user.email a@b.c && git config user.name A && echo more >> README.md && ' +
    'git commit -qam More && git tag -m "The first" v1 && git push -q origin HEAD v1',
  )
  assert.equal(pushed.statusCode, 0, pushed.stderr)
  const content = await repo.contents.get({ path: 'README.md' })
  assert.equal(Buffer.from(content.content, 'base64').toString(), '# Hosted\nmore\n')
  y.tagged = repo
  await vm.delete()
}, VM)

call('tags.list, get, getByHash: of one that was pushed', async (y) => {
  const [tag] = (await y.tagged.tags.list()).tags
  assert.deepEqual([tag.name, tag.message.trim()], ['v1', 'The first'])
  assert.equal((await y.tagged.tags.get({ tagName: 'v1' })).sha, tag.sha)
  assert.equal((await y.tagged.tags.getByHash({ sha: tag.sha })).target.sha, tag.target.sha)
}, VM)
