// Files, watches, signed URLs.
import { assert, call, fails, until } from './registry.js'

const BYTES = Uint8Array.from({ length: 256 }, (_, n) => n)

call('files.write', async (y) => {
  const made = await y.sbx.files.write(y.path('new/dir/a.txt'), 'hällo')
  assert.deepEqual([made.name, made.type, made.path], ['a.txt', 'file', y.path('new/dir/a.txt')])
})

call('files.read', async (y) => assert.equal(await y.sbx.files.read(y.path('new/dir/a.txt')), 'hällo'))

call('files.write, read: bytes, blob, stream', async (y) => {
  await y.sbx.files.write(y.path('b.bin'), BYTES.buffer)
  assert.deepEqual(await y.sbx.files.read(y.path('b.bin'), { format: 'bytes' }), BYTES)
  assert.equal((await y.sbx.files.read(y.path('b.bin'), { format: 'blob' })).size, 256)
  let size = 0
  for await (const piece of await y.sbx.files.read(y.path('b.bin'), { format: 'stream' })) size += piece.length
  assert.equal(size, 256)
  await y.sbx.files.write(y.path('c.bin'), new Blob([BYTES]).stream())
  assert.deepEqual(await y.sbx.files.read(y.path('c.bin'), { format: 'bytes' }), BYTES)
})

call('files.write, read: gzip', async (y) => {
  await y.sbx.files.write(y.path('z.txt'), 'z'.repeat(10_000), { gzip: true })
  assert.equal(await y.sbx.files.read(y.path('z.txt'), { gzip: true }), 'z'.repeat(10_000))
})

call('files.read: missing, directory', async (y) => {
  await fails(y.e2b.NotFoundError, () => y.sbx.files.read(y.path('nothing')))
  await fails(Error, () => y.sbx.files.read(y.dir), 'is a directory')
})

call('files.writeFiles (once files.write)', async (y) => {
  const wanted = [0, 1, 2].map((n) => ({ path: y.path(`many/${n}.txt`), data: String(n) }))
  const made = await (y.sbx.files.writeFiles ? y.sbx.files.writeFiles(wanted) : y.sbx.files.write(wanted)) // once
  assert.deepEqual(made.map((one) => one.name), ['0.txt', '1.txt', '2.txt'])
  assert.equal(await y.sbx.files.read(y.path('many/2.txt')), '2')
})

call('files.list', async (y) => {
  assert.deepEqual((await y.sbx.files.list(y.path('many'))).map((one) => one.name), ['0.txt', '1.txt', '2.txt'])
  const deep = await y.sbx.files.list(y.path('new'), { depth: 2 })
  assert.deepEqual(deep.map((one) => one.path), [y.path('new/dir'), y.path('new/dir/a.txt')])
  await fails(y.e2b.NotFoundError, () => y.sbx.files.list(y.path('nothing')))
  await fails(y.e2b.InvalidArgumentError, () => y.sbx.files.list(y.path('b.bin')))
})

call('files.exists', async (y) => {
  assert.equal(await y.sbx.files.exists(y.path('b.bin')), true)
  assert.equal(await y.sbx.files.exists(y.path('nothing')), false)
})

call('files.getInfo', async (y) => {
  const info = await y.sbx.files.getInfo(y.path('b.bin'))
  assert.deepEqual([info.name, info.size, info.mode, info.permissions], ['b.bin', 256, 0o644, '-rw-r--r--'])
  await y.sbx.commands.run(`ln -s b.bin ${y.path('link')}`)
  assert.equal((await y.sbx.files.getInfo(y.path('link'))).symlinkTarget, y.path('b.bin'))
})

call('files.makeDir', async (y) => {
  assert.equal(await y.sbx.files.makeDir(y.path('made/below')), true)
  assert.equal(await y.sbx.files.makeDir(y.path('made/below')), false)
})

call('files.rename', async (y) => {
  await y.sbx.files.write(y.path('old.txt'), 'x')
  assert.equal((await y.sbx.files.rename(y.path('old.txt'), y.path('made/new.txt'))).path, y.path('made/new.txt'))
  await fails(y.e2b.NotFoundError, () => y.sbx.files.rename(y.path('old.txt'), y.path('z')))
})

call('files.remove', async (y) => {
  await y.sbx.files.remove(y.path('made'))
  assert.equal(await y.sbx.files.exists(y.path('made')), false)
})

call('files.watchDir, watch.stop', async (y) => {
  await y.sbx.files.makeDir(y.path('watched'))
  const seen = []
  const watch = await y.sbx.files.watchDir(y.path('watched'), (event) => { seen.push(event) }, { recursive: true })
  await y.sbx.files.write(y.path('watched/seen.txt'), 'x')
  await until(() => seen.length >= 3)
  assert.deepEqual(seen.map((one) => [one.name, one.type]), ['create', 'chmod', 'write'].map((type) => ['seen.txt', type]))
  await watch.stop()
  await fails(y.e2b.NotFoundError, () => y.sbx.files.watchDir(y.path('nothing'), () => {}))
})

call('sandbox.downloadUrl', async (y) => {
  const url = await y.sbx.downloadUrl(y.path('b.bin'), { useSignatureExpiration: 60 })
  assert.deepEqual(new Uint8Array(await (await fetch(url)).arrayBuffer()), BYTES)
  assert.equal((await fetch(url.replace('signature=v1_', 'signature=v1_x'))).status, 401)
})

call('sandbox.uploadUrl', async (y) => {
  const form = new FormData()
  form.append('file', new Blob(['sent up']), 'up.txt')
  const answer = await fetch(await y.sbx.uploadUrl(y.path('up.txt')), { method: 'POST', body: form })
  assert.equal(answer.status, 200)
  assert.equal(await y.sbx.files.read(y.path('up.txt')), 'sent up')
})
call('files.write, getInfo: metadata', async (y) => {
  const made = await y.sbx.files.write(y.path('m.txt'), 'x', { metadata: { author: 'ada', stage: 'draft' } })
  assert.deepEqual(made.metadata, { author: 'ada', stage: 'draft' })
  assert.deepEqual((await y.sbx.files.getInfo(y.path('m.txt'))).metadata, { author: 'ada', stage: 'draft' })
}, { since: '2.51' })

