/* The module object of the compiled helper: names and arguments only. */
#include "blocks.h"
#include "host.h"
#include "sha.h"
#include "ttft.h"

static PyObject *crc_kind(PyObject *self, PyObject *none)
{
    return PyUnicode_FromString(sky_crc_kind());
}

static PyObject *crc_select(PyObject *self, PyObject *name)
{
    const char *wanted = PyUnicode_AsUTF8AndSize(name, NULL);
    return wanted ? PyBool_FromLong(sky_crc_select(wanted)) : NULL;
}

static PyObject *sha_ready(PyObject *self, PyObject *none)
{
    return PyBool_FromLong(sky_sha_ready());
}

static PyObject *sha_select(PyObject *self, PyObject *wanted)
{
    int truth = PyObject_IsTrue(wanted);
    return truth < 0 ? NULL : PyBool_FromLong(sky_sha_select(truth));
}

static PyMethodDef methods[] = {
    {"crc32", (PyCFunction)(void (*)(void))sky_py_crc32, METH_FASTCALL, "crc32(data, value=0) -> int"},
    {"crc32_combine", sky_py_crc32_combine, METH_VARARGS, "crc32_combine(crc1, crc2, len2) -> int"},
    {"crc32_chunks", sky_py_crc32_chunks, METH_VARARGS, "crc32_chunks(value, chunk_bytes) -> bytes of uint32"},
    {"crc32_join", sky_py_crc32_join, METH_VARARGS, "crc32_join(crcs, chunk_bytes, value_bytes) -> int"},
    {"crc_kind", crc_kind, METH_NOARGS, "which loop serves: vpclmul, pclmul or tables"},
    {"crc_select", crc_select, METH_O, "choose a loop by name, or 'best'; False where the processor lacks it"},
    {"sha_ready", sha_ready, METH_NOARGS, "whether there is a libcrypto, so that it hashes here"},
    {"sha_select", sha_select, METH_O, "do without libcrypto (False) or with it (True): whether it is there"},
    {"sign_packets", sky_py_sign_packets, METH_VARARGS, "sign_packets(headers, header_bytes, sky, ...) -> bytearray"},
    {"check_macs", sky_py_check_macs, METH_VARARGS, "check_macs(data, segment_bytes, sky, keys, ...) -> list of times"},
    {"strip_macs", sky_py_strip_macs, METH_VARARGS, "strip_macs(data, segment_bytes, sky, keep) -> bytearray"},
    {"seal_headers", sky_py_seal_headers, METH_VARARGS, "seal_headers(headers, header_bytes, sky_offset)"},
    {"verify_segments", sky_py_verify_segments, METH_VARARGS, "verify_segments(data, segment_bytes) -> bytes"},
    {"place_segments", sky_py_place_segments, METH_VARARGS, "place_segments(...) -> (placed, duplicates, corrupt, foreign)"},
    {"bulk_headers", sky_py_bulk_headers, METH_VARARGS, "bulk_headers(prefix, refs, sequence, sky_offset) -> bytearray"},
    {"value_refs", sky_py_value_refs, METH_VARARGS, "value_refs(value, key, chunk_bytes, ...) -> (bytearray, crc)"},
    {"answer_get", sky_py_answer_get, METH_VARARGS, "answer_get(...) -> (key, headers, payloads) or None"},
    {"open_runs", sky_py_open_runs, METH_VARARGS, "open_runs(runs, first) -> (indices, chunks, size_bytes, runs) or None"},
    {"serve", sky_py_serve, METH_VARARGS, "serve(fd, scratch, slots, ...) -> (arrivals, served, send errors, passed)"},
    {"serve_runs", sky_py_serve_runs, METH_VARARGS, "serve_runs(fd, scratch, runs, source, ...) -> (kept, served, send errors, passed)"},
    {"same_journey", sky_py_same_journey, METH_VARARGS, "same_journey(data, segment_bytes) -> bool"},
    {"count_hops", sky_py_count_hops, METH_VARARGS, "count_hops(data, segment_bytes) -> bytearray or None"},
    {"place_runs", sky_py_place_runs, METH_VARARGS, "place_runs(runs, first, awaited) -> list of tallies"},
    {"recv_runs", sky_py_recv_runs, METH_VARARGS, "recv_runs(fd, scratch, slots, calls, ...) -> (tallies, other runs)"},
    {"recv_batch", sky_py_recv_batch, METH_VARARGS, "recv_batch(fd, scratch, slots) -> list of arrivals"},
    {"receive_all", sky_py_receive_all, METH_VARARGS, "receive_all(fd, head, size_bytes, timeout_s, tail) -> bytes"},
    {"read_cached", sky_py_read_cached, METH_VARARGS, "read_cached(path, head, out) -> int or None"},
    {"request_words", (PyCFunction)(void (*)(void))sky_py_request_words, METH_FASTCALL, "request_words(data, at, missing, ...) -> (words, at, missing)"},
    {"send_batch", sky_py_send_batch, METH_VARARGS, "send_batch(fd, host, port, headers, header_bytes, payloads) -> int"},
    {"command_packets", sky_py_command_packets, METH_VARARGS, "command_packets(prefix, sequence, rows) -> list of bytes"},
    {"open_ack", sky_py_open_ack, METH_O, "open_ack(packet) -> tuple or None"},
    {"send_slices", sky_py_send_slices, METH_VARARGS, "send_slices(fd, host, port, headers, ...) -> int"},
    {"send_each", sky_py_send_each, METH_VARARGS, "send_each(fd, packets, first) -> int"},
    {"chain_hashes", sky_py_chain_hashes, METH_VARARGS, "chain_hashes(data, block_bytes, seed) -> bytes of uint64"},
    {"fit_prefills", sky_py_fit_prefills, METH_VARARGS, "fit_prefills(points, bend=0.0) -> (fixed, per token, bend)"},
    {"fit_whole", sky_py_fit_whole, METH_O, "fit_whole(points) -> (0.0, per token, bend) or None"},
    {"first_values", sky_py_first_values, METH_O, "first_values(headers) -> dict of bytes"},
    {"pairs_into", sky_py_pairs_into, METH_O, "pairs_into(list) -> callable(name, value)"},
    {"cut_texts", sky_py_cut_texts, METH_O, "cut_texts(text) -> (rest, texts)"},
    {"json_counts", sky_py_json_counts, METH_O, "json_counts(text) -> (lists, texts, commas, items, first_end)"},
    {"header_lines", (PyCFunction)(void (*)(void))sky_py_header_lines, METH_FASTCALL, "header_lines(headers, left_out) -> bytes"},
    {"chain_sha256", sky_py_chain_sha256, METH_VARARGS, "chain_sha256(data, block_bytes, seed) -> list of bytes"},
    {"pack_tokens", sky_py_pack_tokens, METH_O, "pack_tokens(tokens) -> bytes of uint32, or None"},
    {"piece_hashes", sky_py_piece_hashes, METH_VARARGS, "piece_hashes(data, block_bytes, seed) -> bytes of uint64"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_fast", "Compiled twin of skymemory.native.twin.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__fast(void)
{
    sky_crc_init();
    PyObject *made = PyModule_Create(&module);
    SkyType *types[] = {&sky_block_table_type, &sky_prefix_table_type, &sky_holder_table_type, &sky_under_way_type,
                        &sky_prefill_queues_type, &sky_share_guard_type, &sky_delay_price_type, &sky_ttft_ranker_type,
                        &sky_host_directory_type, &sky_host_reader_type, &sky_host_view_type, &sky_host_room_type};
    for (size_t at = 0; made && at < sizeof types / sizeof *types; at++) {
        types[at]->object = (PyTypeObject *)PyType_FromSpec(&types[at]->spec);
        if (!types[at]->object || PyModule_AddType(made, types[at]->object) < 0)
            Py_CLEAR(made);
    }
    return made;
}
