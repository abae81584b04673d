// What the service shows of itself, as people have copied it: agents on forks, a bot that reviews, a VM that sleeps, machines
// with Bun and with a dev server. The builders of the last two are on no registry any more; those here send what theirs did.
import { assert, call, until } from './registry.js'

const VM = { vm: true }

function importing(files) {
  return { import: { type: 'files', files, commitMessage: 'First' } }
}

// Begun first: it has to be idle for a minute.
call('snippet: a persistent VM with an idle timeout', async (y) => {
  const { vm } = await y.fs.vms.create({ persistence: { type: 'persistent' }, idleTimeoutSeconds: 60 })
  await vm.exec('echo kept > /dev/shm/note; echo kept > /root/note')
  y.sleeper = vm
}, VM)

call('snippet: agents on forks, with Promise.all', async (y) => {
  const { repoId } = await y.fs.git.repos.create(importing({ 'task.txt': 'one\n' }))
  const { vm } = await y.fs.vms.create({ git: { repos: [{ repo: repoId }] } })
  await vm.exec('echo installed > /dev/shm/dependencies')
  const { forks } = await vm.fork({ count: 3 })
  const agent = async ({ vm }, task) => {
    await vm.exec(`echo ${task} > /root/result`)
    return (await vm.exec('cat /dev/shm/dependencies /root/result')).stdout
  }
  const done = await Promise.all([agent(forks[0], 'api'), agent(forks[1], 'ui'), agent(forks[2], 'tests')])
  assert.deepEqual(done, ['api', 'ui', 'tests'].map((task) => `installed\n${task}\n`))
  assert.equal((await vm.exec('ls /root/*/task.txt | wc -l; test -e /root/result')).stdout, '1\n')
  await Promise.all([vm, ...forks.map((fork) => fork.vm)].map((one) => one.delete()))
}, VM)

call('snippet: a bot that reviews', async (y) => {
  const { repo, repoId } = await y.fs.git.repos.create(importing({ 'sum.js': 'module.exports = (a, b) => a + b\n' }))
  const test = `const sum = require('./sum.js')\nif (sum(1, 2) !== 3) throw new Error('1 + 2 is ' + sum(1, 2))\n`
  const { branches } = await repo.branches.list()
  await repo.commits.create({
    message: 'Break it',
    branch: branches[0].name,
    files: [{ path: 'sum.js', content: 'module.exports = (a, b) => a - b\n' }, { path: 'test.js', content: test }],
  })
  const { vm } = await y.fs.vms.create({ git: { repos: [{ repo: repoId, path: '/repo' }] } })
  const changed = await vm.exec('cd /repo && git diff --name-only HEAD~1')
  assert.equal(changed.stdout, 'sum.js\ntest.js\n')
  const tests = await vm.exec('cd /repo && node test.js')
  assert.equal(tests.statusCode, 1)
  assert.match(tests.stderr, /1 \+ 2 is -1/)
  await vm.delete()
}, VM)

// ── Bun ──

const INSTALL_BUN = `export BUN_INSTALL="/opt/bun"
curl -fsSL https://bun.sh/install | bash`

function bunOf(sdk) {
  class Bun extends sdk.VmWith {
    configureBaseImage(image) {
      return image.runCommands(INSTALL_BUN, `echo 'export PATH="/opt/bun/bin:$PATH"' > /etc/profile.d/bun.sh`)
    }

    configureSpec(spec) {
      const check = { name: 'install-bun', mode: 'oneshot', exec: ['/opt/bun/bin/bun --version'], timeoutSec: 120 }
      return this.composeSpecs(spec, new sdk.VmSpec().systemdService(check))
    }

    createInstance() {
      return new Runtime()
    }
  }
  class Runtime extends sdk.VmWithInstance {
    async runCode({ code }) {
      const done = await this.vm.exec({ command: `/opt/bun/bin/bun -e "${code.replace(/"/g, '\\"')}"` })
      return { ...done, result: JSON.parse(done.stdout) }
    }
  }
  return new Bun()
}

call('snippet: a spec with Bun', async (y) => {
  const { vm } = await y.fs.vms.create({ spec: new y.sdk.VmSpec().with('bun', bunOf(y.sdk)) })
  const { result } = await vm.bun.runCode({ code: 'console.log(JSON.stringify({ n: 6 * 7, bun: typeof Bun }))' })
  assert.deepEqual(result, { n: 42, bun: 'object' })
  await vm.delete()
}, VM)

call('snippet: Bun without a spec', async (y) => {
  const { vm } = await y.fs.vms.create({ with: { bun: bunOf(y.sdk) } })
  assert.deepEqual((await vm.bun.runCode({ code: 'console.log(JSON.stringify([1]))' })).result, [1])
  await vm.delete()
}, VM)

// ── a dev server ──

const SERVER = `const answer = () => require('fs').readFileSync('page.txt')
require('http').createServer((_, to) => to.end(answer())).listen(3000)`

function devFiles(page, more = {}) {
  return {
    'page.txt': page,
    'server.js': SERVER,
    'package.json': JSON.stringify({ name: 'app', scripts: { dev: 'node server.js' } }),
    ...more,
  }
}

function devServerOf(sdk, { template, repo }) {
  const unit = (name, mode, command, more = {}) => ({ name, mode, exec: [command], workdir: '/repo', ...more })
  return new sdk.VmSpec()
    .repo(template, '/repo')
    .workdir('/repo')
    .systemdService(unit('dev-server-install', 'oneshot', 'npm install', { timeoutSec: 300 }))
    .systemdService(unit('dev-server', 'service', 'npm run dev', {
      after: ['dev-server-install'], requires: ['dev-server-install'], restartPolicy: { policy: 'on-failure' },
    }))
    .systemdService(unit('dev-server-health', 'oneshot', 'until curl -sf localhost:3000; do sleep 0.5; done', {
      after: ['dev-server'], requires: ['dev-server'], timeoutSec: 60, deleteAfterSuccess: true,
    }))
    .snapshot()
    .repo(repo, '/repo')
    .workdir('/repo')
}

call('snippet: a dev server, of a template and then of a repository', async (y) => {
  const made = await y.fs.git.repos.create(importing(devFiles('of the template\n', { 'only.txt': 'x' })))
  const own = await y.fs.git.repos.create(importing(devFiles('of the repository\n')))
  const spec = devServerOf(y.sdk, { template: made.repoId, repo: own.repoId })
  const { vm, domains } = await y.fs.vms.create({ spec, idleTimeoutSeconds: 900 })
  assert(Array.isArray(domains))
  assert.equal((await vm.exec('curl -s localhost:3000; pwd')).stdout, 'of the repository\n/repo\n')
  assert.equal((await vm.exec('git status --short --untracked-files=no; ls only.txt')).stdout, '')
  assert.equal((await vm.systemd.getStatus({ serviceId: 'dev-server' })).activeState, 'active')
  await vm.delete()
}, VM)

call('snippet: the persistent VM sleeps, and wakes as it was', async (y) => {
  await until(async () => (await y.sleeper.getInfo()).state === 'suspended', 120)
  assert.equal((await y.sleeper.exec('cat /dev/shm/note /root/note')).stdout, 'kept\nkept\n')
  assert.equal((await y.sleeper.getInfo()).state, 'running')
  await y.sleeper.delete()
}, VM)
