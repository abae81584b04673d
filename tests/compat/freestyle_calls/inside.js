// Commands, files, watches and terminals in a VM.
import { assert, call, fails, until } from './registry.js'

call('vm.exec', async (y) => {
  const done = await y.vm.exec('echo out; echo err >&2; exit 3')
  assert.deepEqual([done.stdout, done.stderr, done.statusCode], ['out\n', 'err\n', 3])
})

call('vm.exec: options', async (y) => {
  const done = await y.vm.exec({ command: 'echo $0', timeoutMs: 20_000 })
  assert.equal(done.statusCode, 0)
})

call('vm.exec: pipes and quotes', async (y) => {
  assert.equal((await y.vm.exec(`printf '%s' "a b" | tr a-z A-Z`)).stdout, 'A B')
})

call('vm.exec: much output', async (y) => {
  assert.equal((await y.vm.exec('yes 0123456789abcde | head -c 2000000')).stdout.length, 2_000_000)
})

call('vm.exec: killed by a signal', async (y) => {
  assert.equal((await y.vm.exec('kill -9 $$')).statusCode, 137)
})

call('vm.exec: timeoutMs', async (y) => {
  const error = await fails('EXEC_TIMED_OUT', () => y.vm.exec({ command: 'echo begun; sleep 60', timeoutMs: 700 }))
  assert.equal(error.body.stdout, 'begun\n')
}, { since: '0.1.49' })

call('vm.exec: concurrent', async (y) => {
  const done = await Promise.all([1, 2, 3, 4].map((n) => y.vm.exec(`sleep 0.1; echo ${n}`)))
  assert.deepEqual(done.map((one) => one.stdout), ['1\n', '2\n', '3\n', '4\n'])
})

call('vm.user', async (y) => {
  const root = y.vm.user({ username: 'root' })
  assert.equal((await root.exec('id -un')).stdout, 'root\n')
  const nobody = y.vm.user({ username: 'nobody-here' })
  await fails('USER_NOT_FOUND', () => nobody.exec('true'))
}, { since: '0.1.49' })

call('fs.writeTextFile', async (y) => {
  await y.vm.fs.writeTextFile(y.path('a b.txt'), 'hällo\n')
  assert.equal((await y.vm.exec(`cat '${y.path('a b.txt')}'`)).stdout, 'hällo\n')
})

call('fs.readTextFile', async (y) => {
  assert.equal(await y.vm.fs.readTextFile(y.path('a b.txt')), 'hällo\n')
})

call('fs.writeFile', async (y) => {
  await y.vm.fs.writeFile(y.path('deep/er/b.bin'), Buffer.from([...Array(256).keys()]))
  assert.equal((await y.vm.exec(`stat -c %s ${y.path('deep/er/b.bin')}`)).stdout, '256\n')
})

call('fs.readFile', async (y) => {
  assert.deepEqual([...(await y.vm.fs.readFile(y.path('deep/er/b.bin')))], [...Array(256).keys()])
})

call('fs.readFile: missing', async (y) => {
  await fails('FILE_NOT_FOUND', () => y.vm.fs.readFile(y.path('nothing')))
})

call('fs.readDir', async (y) => {
  const found = await y.vm.fs.readDir(y.dir)
  assert.deepEqual(found.find((one) => one.name === 'deep').kind, 'directory')
  assert.deepEqual(found.find((one) => one.name === 'a b.txt').kind, 'file')
})

call('fs.mkdir', async (y) => {
  await y.vm.fs.mkdir(y.path('made/by/us'), true)
  assert.equal((await y.vm.exec(`test -d ${y.path('made/by/us')}`)).statusCode, 0)
})

call('fs.exists', async (y) => {
  assert.equal(await y.vm.fs.exists(y.path('made')), true)
  assert.equal(await y.vm.fs.exists(y.path('nothing')), false)
})

call('fs.stat', async (y) => {
  const found = await y.vm.fs.stat(y.path('deep/er/b.bin'))
  assert.deepEqual([found.size, found.isFile, found.isDirectory], [256, true, false])
})

call('fs.remove', async (y) => {
  await y.vm.fs.remove(y.path('made'), true)
  assert.equal(await y.vm.fs.exists(y.path('made')), false)
})

call('fs.watchFiles', async (y) => {
  const seen = []
  const watching = (async () => {
    for await (const event of y.vm.fs.watchFiles()) {
      seen.push(event)
      if (event.filename.endsWith('last.txt')) return
    }
  })()
  let round = 0
  await until(async () => {
    await y.vm.fs.writeTextFile(y.path(`watched-${round++}.txt`), 'x')
    return seen.length > 0
  })
  await y.vm.fs.writeTextFile(y.path('last.txt'), 'x')
  await watching
  assert(seen.every((event) => event.eventType && event.filename.startsWith(y.dir)))
}, { since: '0.1.52' })

call('vm.exec: terminal', async (y) => {
  await y.vm.exec({ command: 'echo one; echo two', terminal: 'build' })
})

call('terminals.list', async (y) => {
  const { terminals } = await y.vm.terminals.list()
  assert(terminals.some((one) => one.name === 'build'))
})

call('terminals.getLogs', async (y) => {
  const { logs } = await y.vm.terminals.getLogs({ terminalId: 'build' })
  assert.deepEqual(logs.map((one) => one.line), ['one', 'two'])
})

call('terminals.getOutput', async (y) => {
  assert.equal((await y.vm.terminals.getOutput({ terminalId: 'build' })).output, 'one\ntwo\n')
})

// ── terminals over a WebSocket ──

call('pty.open', async (y) => {
  y.seen = ''
  y.exit = null
  y.session = await y.vm.pty.open({
    cols: 100,
    rows: 30,
    exec: 'stty size; while read line; do echo got $line; done',
    onData: (data) => { y.seen += Buffer.from(data).toString() },
    onExit: (code) => { y.exit = code },
  })
  await until(() => y.seen.includes('30 100'))
}, { since: '0.1.63' })

call('session.write', async (y) => {
  y.session.write('hello\n')
  await until(() => y.seen.includes('got hello'))
}, { since: '0.1.63' })

call('session.resize', async (y) => {
  y.session.resize({ cols: 90, rows: 20 })
}, { since: '0.1.63' })

call('pty.list', async (y) => {
  await until(async () => {
    const { sessions } = await y.vm.pty.list()
    const one = sessions.find((session) => session.sessionId === y.session.sessionId)
    assert.deepEqual([one.running, one.attachedCount], [true, 1])
    return one.cols === 90 && one.rows === 20
  })
}, { since: '0.1.63' })

call('pty.attach', async (y) => {
  let replay = ''
  const other = await y.vm.pty.attach({
    sessionId: y.session.sessionId,
    onData: (data) => { replay += Buffer.from(data).toString() },
  })
  await until(() => replay.includes('got hello'))
  other.write('again\n')
  await until(() => replay.includes('got again') && y.seen.includes('got again'))
  other.detach()
}, { since: '0.1.63' })

call('session.detach: the program goes on', async (y) => {
  y.session.detach()
  const { sessions } = await y.vm.pty.list()
  assert(sessions.find((session) => session.sessionId === y.session.sessionId).running)
}, { since: '0.1.63' })

call('pty.open: sessionId', async (y) => {
  const session = await y.vm.pty.open({ sessionId: 'mine', exec: 'exit 7', onExit: (code) => { y.exit = code } })
  assert.equal(session.sessionId, 'mine')
  await until(() => y.exit !== null)
}, { since: '0.1.63' })

call('pty.open: a shell', async (y) => {
  let seen = ''
  const session = await y.vm.pty.open({ onData: (data) => { seen += Buffer.from(data).toString() } })
  session.write('echo $((6 * 7)) of $TERM\n')
  await until(() => seen.includes('42 of xterm-256color'))
  session.signal('SIGKILL')
}, { since: '0.1.63' })

call('pty.close', async (y) => {
  assert.equal((await y.vm.pty.close({ sessionId: y.session.sessionId })).sessionId, y.session.sessionId)
  const { sessions } = await y.vm.pty.list()
  assert(!sessions.find((session) => session.sessionId === y.session.sessionId).running)
  await fails('SESSION_NOT_FOUND', () => y.vm.pty.close({ sessionId: 'nothing' }))
}, { since: '0.1.63' })
