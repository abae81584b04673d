// Commands and terminals.
import { assert, call, fails, until } from './registry.js'

call('commands.run', async (y) => {
  const done = await y.sbx.commands.run('echo out; echo err >&2; echo $GREETING')
  assert.deepEqual([done.stdout, done.stderr, done.exitCode], ['out\nhello\n', 'err\n', 0])
})

call('commands.run: envs, cwd', async (y) => {
  await y.sbx.files.makeDir(y.path('cwd'))
  const done = await y.sbx.commands.run('echo $NAME; pwd', { envs: { NAME: 'value' }, cwd: y.path('cwd') })
  assert.equal(done.stdout, `value\n${y.path('cwd')}\n`)
})

call('commands.run: cwd that is not there', async (y) => {
  await fails(y.e2b.InvalidArgumentError, () => y.sbx.commands.run('true', { cwd: '/no/such' }), 'does not exist')
})

call('commands.run: exit code', async (y) => {
  const error = await fails(y.e2b.CommandExitError, () => y.sbx.commands.run('echo before; exit 7'))
  assert.deepEqual([error.exitCode, error.stdout], [7, 'before\n'])
})

call('commands.run: callbacks', async (y) => {
  let [out, err] = ['', '']
  await y.sbx.commands.run('echo one; echo two >&2', {
    onStdout: (text) => { out += text },
    onStderr: (text) => { err += text },
  })
  assert.deepEqual([out, err], ['one\n', 'two\n'])
})

call('commands.run: timeout', async (y) => {
  await fails(y.e2b.TimeoutError, () => y.sbx.commands.run('sleep 30', { timeoutMs: 1000 }))
})

call('commands.run: user', async (y) => {
  assert.equal((await y.sbx.commands.run('whoami', { user: 'root' })).stdout, 'root\n')
  await fails(y.e2b.AuthenticationError, () => y.sbx.commands.run('true', { user: 'nobody-here' }), 'invalid username')
})

call('commands.run: much output', async (y) => {
  const done = await y.sbx.commands.run('yes 0123456789abcde | head -c 2000000')
  assert.equal(done.stdout.length, 2_000_000)
})

call('commands.run: background, handle.wait', async (y) => {
  const handle = await y.sbx.commands.run('echo begun; sleep 0.3; echo done', { background: true })
  assert(handle.pid > 0)
  assert.equal((await handle.wait()).stdout, 'begun\ndone\n')
})

call('commands.list, kill', async (y) => {
  const handle = await y.sbx.commands.run('sleep 60', { background: true })
  const found = (await y.sbx.commands.list()).find((one) => one.pid === handle.pid)
  assert.deepEqual([found.cmd, found.args.at(-1)], ['/bin/bash', 'sleep 60'])
  assert.equal(await y.sbx.commands.kill(handle.pid), true)
  await fails(y.e2b.CommandExitError, () => handle.wait())
  assert.equal(await y.sbx.commands.kill(999_999), false)
})

call('handle.kill', async (y) => {
  const handle = await y.sbx.commands.run('sleep 60', { background: true })
  assert.equal(await handle.kill(), true)
})

call('commands.connect', async (y) => {
  const handle = await y.sbx.commands.run('read line; echo got $line', { background: true, stdin: true })
  await handle.disconnect()
  const again = await y.sbx.commands.connect(handle.pid)
  await y.sbx.commands.sendStdin(handle.pid, 'it\n')
  assert.equal((await again.wait()).stdout, 'got it\n')
  await fails(y.e2b.NotFoundError, () => y.sbx.commands.connect(999_999))
})

call('commands.closeStdin', async (y) => {
  const handle = await y.sbx.commands.run('cat', { background: true, stdin: true })
  await handle.sendStdin('all of it')
  await y.sbx.commands.closeStdin(handle.pid)
  assert.equal((await handle.wait()).stdout, 'all of it')
}, { since: '2.51' })

call('pty.create, sendInput, resize', async (y) => {
  let seen = ''
  const handle = await y.sbx.pty.create({
    cols: 60,
    rows: 20,
    envs: { HISTFILE: '/dev/null' },
    onData: (data) => { seen += Buffer.from(data).toString() },
  })
  await y.sbx.pty.sendInput(handle.pid, Buffer.from('stty size\n'))
  await until(() => seen.includes('20 60'))
  await y.sbx.pty.resize(handle.pid, { cols: 70, rows: 30 })
  await y.sbx.pty.sendInput(handle.pid, Buffer.from('stty size; exit\n'))
  await handle.wait()
  assert(seen.includes('30 70'))
})

call('pty.connect, kill', async (y) => {
  const handle = await y.sbx.pty.create({ cols: 60, rows: 20, envs: { HISTFILE: '/dev/null' }, onData: () => {} })
  await handle.disconnect()
  let seen = ''
  const again = await y.sbx.pty.connect(handle.pid, { onData: (data) => { seen += Buffer.from(data).toString() } })
  await y.sbx.pty.sendInput(handle.pid, Buffer.from('echo a$((1+1))b\n'))
  await until(() => seen.includes('a2b'))
  assert.equal(await y.sbx.pty.kill(again.pid), true)
  assert.equal(await y.sbx.pty.kill(999_999), false)
}, { since: '2.51' })

call('git.init, configureUser, add, commit, status', async (y) => {
  const repo = y.path('repo')
  await y.sbx.git.init(repo, { initialBranch: 'main' })
  await y.sbx.git.configureUser('Ada', 'ada@example.com', { scope: 'local', path: repo })
  await y.sbx.files.write(`${repo}/a.txt`, 'a')
  assert.equal((await y.sbx.git.status(repo)).isClean, false)
  await y.sbx.git.add(repo)
  await y.sbx.git.commit(repo, 'first')
  assert.equal((await y.sbx.git.status(repo)).isClean, true)
}, { since: '2.51' })

call('git.createBranch, checkoutBranch, branches, deleteBranch', async (y) => {
  const repo = y.path('repo')
  await y.sbx.git.createBranch(repo, 'other')
  await y.sbx.git.checkoutBranch(repo, 'main')
  const found = await y.sbx.git.branches(repo)
  assert.deepEqual([found.currentBranch, found.branches.sort()], ['main', ['main', 'other']])
  await y.sbx.git.deleteBranch(repo, 'other', { force: true })
}, { since: '2.51' })

call('git.clone, remoteGet', async (y) => {
  await y.sbx.git.clone(y.path('repo'), { path: y.path('cloned') })
  assert.equal(await y.sbx.git.remoteGet(y.path('cloned'), 'origin'), y.path('repo'))
}, { since: '2.51' })
