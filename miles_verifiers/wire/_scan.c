/* scan.py, compiled: the two passes over JSON text that most of a request's CPU went to.

   Both are narrower than scan.py, never wider: what they give, scan.py gives as well. Where they give None, a parser looks
   at the text. So they know only what encoders write: no spaces, log-probs from -999 to 0 with a fraction, ids of ten digits.

   The bytes of a Python `bytes` end with a NUL, which is no character that any loop here goes on at: none leaves them. */

#define Py_LIMITED_API 0x030B0000 /* one file for Python 3.11 and newer */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#define LENGTH(text) ((Py_ssize_t)sizeof(text) - 1)
#define STARTS_WITH(at, text) (strncmp((at), (text), sizeof(text) - 1) == 0)
#define ID_DIGITS 10

static const char BEFORE_LOGPROB[] = "{\"logprob\":";
static const char BEFORE_ID[] = ",\"token\":\"token_id:";
static const char BEHIND_ID[] = "\"}";
static const char BEHIND_ROW[] = ",null]";

static const char *
behind_digits(const char *at)
{
    while (*at >= '0' && *at <= '9')
        at++;
    return at;
}

/* Behind the digits at `at`, or NULL unless they are 1 to `most` of them, and no zero leads. */
static const char *
behind_whole(const char *at, Py_ssize_t most)
{
    const char *end = behind_digits(at);
    if (end == at || end - at > most || (*at == '0' && end - at > 1))
        return NULL;
    return end;
}

/* Behind the id at `at`, or NULL. */
static const char *
behind_id(const char *at, long long *largest)
{
    const char *end = behind_whole(at, ID_DIGITS);
    long long id = 0;
    if (end == NULL)
        return NULL;
    while (at < end)
        id = 10 * id + (*at++ - '0');
    if (id > *largest)
        *largest = id;
    return end;
}

/* Behind the number at `at`, or NULL unless its form alone says that it is above -1000 and not above zero. */
static const char *
behind_logprob(const char *at)
{
    const char *fraction, *end;
    if (STARTS_WITH(at, "0.0,"))
        return at + LENGTH("0.0");
    if (*at != '-')
        return NULL;
    end = behind_whole(at + 1, 3);
    if (end == NULL || *end != '.')
        return NULL;
    fraction = end + 1;
    end = behind_digits(fraction);
    if (end == fraction)
        return NULL;
    if (*end == 'e') {
        if (end[1] != '-')
            return NULL;
        end = behind_whole(end + 2, 3);
    }
    return end;
}

static char *
put(char *out, const char *text, Py_ssize_t length)
{
    memcpy(out, text, (size_t)length);
    return out + length;
}

/* Write the `count` good rows at `at` as a list of ids and as renderers' content. Returns what is behind them. */
static const char *
write_rows(const char *at, Py_ssize_t count, char *ids, char *content)
{
    *ids++ = '[';
    for (Py_ssize_t row = 0; row < count; row++) {
        const char *logprob = at + 1, *id, *end;
        if (row > 0)
            *content++ = ',';
        for (end = logprob; *end != ','; end++)
            ;
        content = put(content, BEFORE_LOGPROB, LENGTH(BEFORE_LOGPROB));
        content = put(content, logprob, end - logprob);
        id = end + 1;
        end = behind_digits(id);
        content = put(content, BEFORE_ID, LENGTH(BEFORE_ID));
        content = put(content, id, end - id);
        content = put(content, BEHIND_ID, LENGTH(BEHIND_ID));
        ids = put(ids, id, end - id);
        *ids++ = row + 1 < count ? ',' : ']';
        at = end + LENGTH(BEHIND_ROW) + 1; /* and the comma or bracket */
    }
    return at;
}

/* `raw` from `start` on, or NULL with an error set. */
static const char *
text_at(PyObject *args, Py_ssize_t *start)
{
    PyObject *raw;
    if (!PyArg_ParseTuple(args, "Sn", &raw, start))
        return NULL;
    if (*start < 0 || *start > PyBytes_Size(raw)) {
        PyErr_SetString(PyExc_IndexError, "start lies outside of the text");
        return NULL;
    }
    return PyBytes_AsString(raw) + *start;
}

static PyObject *
rows(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_ssize_t start, count = 0, id_chars = 0, logprob_chars = 0, separators;
    long long largest = -1;
    PyObject *ids, *content;
    const char *text = text_at(args, &start), *at, *end;
    if (text == NULL)
        return NULL;
    if (*text != '[')
        Py_RETURN_NONE;
    for (at = text + 1;; at++) { /* each row, and the comma or bracket behind it */
        if (*at++ != '[')
            Py_RETURN_NONE;
        end = behind_logprob(at);
        if (end == NULL || *end != ',')
            Py_RETURN_NONE;
        logprob_chars += end - at;
        at = end + 1;
        end = behind_id(at, &largest);
        if (end == NULL || !STARTS_WITH(end, BEHIND_ROW))
            Py_RETURN_NONE;
        id_chars += end - at;
        at = end + LENGTH(BEHIND_ROW);
        count++;
        if (*at == ']')
            break;
        if (*at != ',')
            Py_RETURN_NONE;
    }
    separators = count - 1;
    ids = PyBytes_FromStringAndSize(NULL, LENGTH("[]") + id_chars + separators);
    content = PyBytes_FromStringAndSize(
        NULL, logprob_chars + id_chars + separators
                  + count * (LENGTH(BEFORE_LOGPROB) + LENGTH(BEFORE_ID) + LENGTH(BEHIND_ID)));
    if (ids == NULL || content == NULL) {
        Py_XDECREF(ids);
        Py_XDECREF(content);
        return NULL;
    }
    at = write_rows(text + 1, count, PyBytes_AsString(ids), PyBytes_AsString(content));
    return Py_BuildValue("nnLNN", start + (at - text), count, largest, ids, content);
}

static PyObject *
integers(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_ssize_t start, count = 0;
    long long largest = -1;
    const char *text = text_at(args, &start), *at = text;
    if (text == NULL)
        return NULL;
    if (*at++ != '[')
        Py_RETURN_NONE;
    while (*at != ']') {
        if (count > 0 && *at++ != ',')
            Py_RETURN_NONE;
        at = behind_id(at, &largest);
        if (at == NULL)
            Py_RETURN_NONE;
        count++;
    }
    return Py_BuildValue("nnL", start + (at + 1 - text), count, largest);
}

/* What scan.py asks for: an installed file may be older than the Python beside it. */
#define VERSION 1

static int
set_version(PyObject *module)
{
    return PyModule_AddIntConstant(module, "VERSION", VERSION);
}

static PyMethodDef methods[] = {
    {"rows", rows, METH_VARARGS, "See scan.py."},
    {"integers", integers, METH_VARARGS, "See scan.py."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, set_version}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_scan", .m_doc = "See scan.py.", .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__scan(void)
{
    return PyModuleDef_Init(&module);
}
