// Calls of the published `@e2b/code-interpreter`, each with what a caller may rely on; told as those of `e2b_npm` are.
import assert from 'node:assert/strict'

const CALLS = []
const call = (name, check, since = '2.7') => CALLS.push([name, since, check])

call('Sandbox.create', async (y) => {
  const envs = process.env.COMPAT_PATH ? { PATH: process.env.COMPAT_PATH } : {}
  y.sbx = await y.package.Sandbox.create({ timeoutMs: 1_200_000, envs })
})

call('runCode', async (y) => {
  const done = await y.sbx.runCode("x = 41\nprint('hello')\nx + 1")
  assert.equal(done.text, '42')
  assert.equal(done.logs.stdout.join(''), 'hello\n')
  assert.equal((await y.sbx.runCode('x * 2')).text, '82')
})

call('runCode: callbacks', async (y) => {
  const seen = { stdout: '', stderr: '', results: [] } // in pieces as they come
  await y.sbx.runCode("import sys\nprint('one')\nprint('two', file=sys.stderr)\n3", {
    onStdout: (message) => { seen.stdout += message.line },
    onStderr: (message) => { seen.stderr += message.line },
    onResult: (result) => { seen.results.push(result.text) },
  })
  assert.deepEqual(seen, { stdout: 'one\n', stderr: 'two\n', results: ['3'] })
})

call('runCode: error', async (y) => {
  const done = await y.sbx.runCode('1 / 0')
  assert.equal(done.error.name, 'ZeroDivisionError')
  assert(done.error.traceback.includes('ZeroDivisionError'))
})

call('runCode: envs', async (y) => {
  const done = await y.sbx.runCode("import os; os.environ['ONCE']", { envs: { ONCE: 'here' } })
  assert.equal(done.text, 'here')
})

call('runCode: timeout', async (y) => {
  await assert.rejects(() => y.sbx.runCode('import time; time.sleep(60)', { timeoutMs: 2000 }))
  assert.equal((await y.sbx.runCode('x')).text, '41')
})

call('runCode: bash', async (y) => {
  const done = await y.sbx.runCode('echo from bash', { language: 'bash' })
  assert.equal(done.logs.stdout.join(''), 'from bash\n')
})

call('runCode: javascript', async (y) => {
  assert.equal((await y.sbx.runCode('const n = 20; n + 1', { language: 'js' })).text, '21')
  assert.equal((await y.sbx.runCode('n * 2', { language: 'javascript' })).text, '40')
})

call('runCode: charts', async (y) => {
  const begin = 'import matplotlib.pyplot as plt\n'
  const line = await y.sbx.runCode(`${begin}plt.plot([0, 1], [2, 3], label='it'); plt.xlabel('t (s)'); plt.show()`)
  assert(line.results[0].png.startsWith('iVBOR'))
  const { type, x_unit, elements } = line.results[0].chart
  assert.deepEqual([type, x_unit, elements], ['line', 's', [{ label: 'it', points: [[0, 2], [1, 3]] }]])
  const bar = await y.sbx.runCode(`${begin}plt.bar(['A', 'B'], [1, 2]); plt.show()`)
  assert.deepEqual(bar.results[0].chart.elements.map((one) => [one.label, one.value]), [['A', 1], ['B', 2]])
})

call('createCodeContext, listCodeContexts, restartCodeContext, removeCodeContext', async (y) => {
  const context = await y.sbx.createCodeContext({ cwd: '/tmp' })
  assert.equal((await y.sbx.runCode('import os; y = 5; os.getcwd()', { context })).text, '/tmp')
  assert((await y.sbx.listCodeContexts()).some((one) => one.id === context.id))
  await y.sbx.restartCodeContext(context)
  assert.equal((await y.sbx.runCode('y', { context })).error.name, 'NameError')
  await y.sbx.removeCodeContext(context)
  await assert.rejects(() => y.sbx.runCode('1', { context }))
})

call('kill', async (y) => assert.notEqual(await y.sbx.kill(), false))

async function main() {
  if (process.argv.includes('--list')) {
    console.log(JSON.stringify(CALLS.map(([name, since]) => [name, since])))
    return
  }
  const yard = { package: await import('@e2b/code-interpreter') }
  for (const [name, , check] of CALLS) {
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
