/* Decodes a rectangle of a JPEG file, to the same bits as that part of the whole picture decoded by libjpeg-turbo.
 *
 * Entropy decoding stops at the rectangle's last row; of what lies above it only the coefficients' positions are
 * followed, and of what lies beside it nothing is transformed. One unit of the coding grid around the rectangle is
 * decoded with it, because the interpolation of colour looks at its neighbours.
 *
 * Only files are taken whose judgement needs nobody else: 8-bit baseline or progressive files of one or three
 * components, with nothing that libjpeg warns of, whose last scan ends with an end-of-image marker and holds
 * no marker that could make a whole decoding fail. All others are declined, and the caller asks Pillow.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <setjmp.h>
#include <stdio.h>
#include <string.h>

#include <jpeglib.h>

#include "resize_uint8.h"

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "libjpeg-turbo 2.1 or newer is needed: earlier ones cannot skip rows of every file to the bit"
#endif

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

enum { DECLINED = 0, DECODED = 1 };

/* -------------------------------------------------------------------------------------------- the file's head */

typedef struct {
    const unsigned char *at;
    size_t left;
} Bytes;

typedef struct {
    unsigned height, width, orientation;
    int has_exif, says_exif, doubts_xmp; /* EXIF data; with an orientation; XMP with another than upright */
} Head;

static unsigned big16(const unsigned char *p) { return (unsigned)p[0] << 8 | p[1]; }

static int begins(Bytes s, const char *with, size_t length) {
    return s.left >= length && memcmp(s.at, with, length) == 0;
}

static unsigned word(const unsigned char *p, int bytes, int little) {
    unsigned value = 0;
    for (int i = 0; i < bytes; i++) value = value << 8 | p[little ? bytes - 1 - i : i];
    return value;
}

/* Reads the orientation from EXIF data (from the byte order on); declines what is in any way odd. */
static int read_exif(Bytes tiff, Head *head) {
    if (head->has_exif++ || tiff.left < 14) return DECLINED;
    int little = begins(tiff, "II*\0", 4);
    if (!little && !begins(tiff, "MM\0*", 4)) return DECLINED;
    size_t start = word(tiff.at + 4, 4, little);
    if (start < 8 || start > tiff.left - 2) return DECLINED;
    size_t entries = word(tiff.at + start, 2, little);
    if ((tiff.left - start - 2) / 12 < entries) return DECLINED;
    for (size_t i = 0; i < entries; i++) {
        const unsigned char *entry = tiff.at + start + 2 + 12 * i;
        if (word(entry, 2, little) != 0x0112) continue;
        /* One short from 1 to 8, and no second opinion. */
        if (head->says_exif++ || word(entry + 2, 2, little) != 3 || word(entry + 4, 4, little) != 1) return DECLINED;
        head->orientation = word(entry + 8, 2, little);
        if (head->orientation < 1 || head->orientation > 8) return DECLINED;
    }
    return DECODED;
}

/* Whether a packet of XMP leaves the picture as it lies. */
static int upright_xmp(Bytes s) {
    static const char key[] = "tiff:Orientation";
    const size_t length = sizeof key - 1;
    while (s.left >= length) {
        const unsigned char *found = memchr(s.at, 't', s.left - length + 1);
        if (found == NULL) return 1;
        s.left -= (size_t)(found - s.at);
        s.at = found;
        if (begins(s, key, length)) {
            Bytes rest = {s.at + length, s.left - length};
            if (!begins(rest, "=\"1\"", 4) && !begins(rest, ">1<", 3)) return 0;
        }
        s.at++;
        s.left--;
    }
    return 1;
}

/* Declines an application segment unless Pillow reads it without a word and it changes nothing but the orientation. */
static int read_application(int marker, Bytes s, Head *head) {
    int is_odd = 0;
    if (marker == 0xE0) is_odd = begins(s, "JFIF", 4) && s.left < 7;
    if (marker == 0xE1 && begins(s, "Exif\0\0", 6)) return read_exif((Bytes){s.at + 6, s.left - 6}, head);
    if (marker == 0xE1 && !upright_xmp(s)) head->doubts_xmp = 1;
    if (marker == 0xE2) is_odd = begins(s, "MPF\0", 4) || (begins(s, "ICC_PROFILE\0", 12) && s.left < 14);
    if (marker == 0xEE) is_odd = begins(s, "Adobe", 5) && s.left < 12;
    return is_odd ? DECLINED : DECODED;
}

static int read_frame(Bytes s, Head *head) {
    if (head->width || s.left < 6 || s.at[0] != 8) return DECLINED;
    head->height = big16(s.at + 1);
    head->width = big16(s.at + 3);
    unsigned components = s.at[5];
    if (!head->height || !head->width || (components != 1 && components != 3)) return DECLINED;
    if (s.left != 6 + 3 * (size_t)components) return DECLINED;
    if (components == 1) return DECODED;
    /* 4:4:4, 4:2:2 or 4:2:0: versions of libjpeg-turbo interpolate the rarer ones differently. */
    unsigned luma = s.at[7];
    return (luma == 0x11 || luma == 0x21 || luma == 0x22) && s.at[10] == 0x11 && s.at[13] == 0x11 ? DECODED : DECLINED;
}

/* Reads the segments up to the first scan; declines whatever is in any way unusual. */
static int read_head(const unsigned char *data, size_t size, Head *head) {
    size_t at = 2;
    *head = (Head){.orientation = 1};
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8) return DECLINED;
    while (size - at >= 4 && data[at] == 0xFF) {
        int marker = data[at + 1];
        size_t length = big16(data + at + 2);
        if (length < 2 || length > size - at - 2) return DECLINED;
        Bytes segment = {data + at + 4, length - 2};
        switch (marker) {
        case 0xC0: case 0xC1: case 0xC2:
            if (read_frame(segment, head) == DECLINED) return DECLINED;
            break;
        case 0xC4: case 0xDB: case 0xDD: case 0xFE:
            break;
        case 0xDA:
            /* XMP is heard only where EXIF is silent. */
            return head->width && (head->says_exif || !head->doubts_xmp) ? DECODED : DECLINED;
        default:
            if (marker < 0xE0 || marker > 0xEF || read_application(marker, segment, head) == DECLINED) return DECLINED;
        }
        at += 2 + length;
    }
    return DECLINED;
}

/* ------------------------------------------------------------------------------------------------- the pixels */

typedef struct {
    const unsigned char *data;
    size_t size;
    unsigned char *out;
    unsigned channels, top, left, height, width, denominator;
} Job;

typedef struct {
    struct jpeg_error_mgr base;
    jmp_buf escape;
} Errors;

static void escape(j_common_ptr info) { longjmp(((Errors *)info->err)->escape, 1); }

static void stay_silent(j_common_ptr info) { (void)info; }

static void count_warning(j_common_ptr info, int level) {
    if (level < 0) info->err->num_warnings++;
}

/* Whether what follows the decoded rows can only end well: no marker but restarts, then the end of the image. */
static int ends_well(j_decompress_ptr info) {
    const unsigned char *at = info->src->next_input_byte, *end = at + info->src->bytes_in_buffer;
    int marker = info->unread_marker;
    for (;;) {
        if (marker == 0xD9) return 1;
        if (marker != 0 && (marker < 0xD0 || marker > 0xD7)) return 0;
        at = at < end ? memchr(at, 0xFF, (size_t)(end - at)) : NULL;
        if (at == NULL) return 0;
        while (at < end && *at == 0xFF) at++;
        if (at == end) return 0;
        marker = *at++;
    }
}

/* Whether all bits of a progressive file's coefficients have come: else libjpeg would smooth what lacks them. */
static int is_complete(j_decompress_ptr info) {
    if (!info->progressive_mode) return 1;
    for (int component = 0; component < info->num_components; component++)
        for (int k = 0; k < DCTSIZE2; k++)
            if (info->coef_bits[component][k] > 0 || (k < 10 && info->coef_bits[component][k] < 0)) return 0;
    return 1;
}

/* ITU-R 601 luma in 16 bits, as Pillow computes it of decoded colours. */
static void to_grey(unsigned char *out, const unsigned char *rgb, unsigned width) {
    for (unsigned i = 0; i < width; i++, rgb += 3)
        out[i] = (unsigned char)((rgb[0] * 19595u + rgb[1] * 38470u + rgb[2] * 7471u + 0x8000u) >> 16);
}

static void read_rows(j_decompress_ptr info, const Job *job, unsigned skipped_columns) {
    unsigned decoded = (unsigned)info->output_components;
    size_t row_bytes = (size_t)job->width * job->channels;
    JSAMPARRAY rows = info->mem->alloc_sarray(
        (j_common_ptr)info, JPOOL_IMAGE, info->output_width * decoded, (JDIMENSION)info->rec_outbuf_height);
    unsigned char *out = job->out;
    unsigned end = job->top + job->height;
    while (info->output_scanline < end) {
        unsigned first = info->output_scanline;
        unsigned count = jpeg_read_scanlines(info, rows, (JDIMENSION)info->rec_outbuf_height);
        for (unsigned i = 0; i < count; i++) {
            if (first + i < job->top || first + i >= end) continue;
            const unsigned char *row = rows[i] + (size_t)skipped_columns * decoded;
            if (decoded == job->channels) memcpy(out, row, row_bytes);
            else to_grey(out, row, job->width);
            out += row_bytes;
        }
    }
}

static int decode_started(j_decompress_ptr info, const Job *job) {
    if (job->left + job->width > info->output_width || job->top + job->height > info->output_height) return DECLINED;
    unsigned unit = (unsigned)info->min_DCT_scaled_size;
    unsigned across = unit * (unsigned)info->max_h_samp_factor, down = unit * (unsigned)info->max_v_samp_factor;
    unsigned left = job->left > across ? job->left - across : 0;
    unsigned right = job->left + job->width + across;
    if (right > info->output_width) right = info->output_width;
    JDIMENSION first = left, span = right - left;
    if (span < info->output_width) jpeg_crop_scanline(info, &first, &span);
    else first = 0;
    if (job->top > down) jpeg_skip_scanlines(info, job->top - down);
    read_rows(info, job, job->left - first);
    return DECODED;
}

static int decode(const Job *job) {
    struct jpeg_decompress_struct info;
    Errors errors;
    volatile int result = DECLINED;
    info.err = jpeg_std_error(&errors.base);
    errors.base.error_exit = escape;
    errors.base.output_message = stay_silent;
    errors.base.emit_message = count_warning;
    if (setjmp(errors.escape) == 0) {
        jpeg_create_decompress(&info);
        jpeg_mem_src(&info, job->data, (unsigned long)job->size);
        jpeg_read_header(&info, TRUE);
        J_COLOR_SPACE space = info.jpeg_color_space;
        if (space == JCS_GRAYSCALE || space == JCS_YCbCr || space == JCS_RGB) {
            info.out_color_space = space == JCS_GRAYSCALE && job->channels == 1 ? JCS_GRAYSCALE : JCS_RGB;
            info.scale_num = 1;
            info.scale_denom = job->denominator;
            info.dct_method = JDCT_ISLOW;
            info.do_block_smoothing = FALSE;
            jpeg_start_decompress(&info);
            int whole = jpeg_has_multiple_scans(&info); /* then all of the file has been read */
            if (is_complete(&info) && decode_started(&info, job) == DECODED)
                result = (whole || ends_well(&info)) && errors.base.num_warnings == 0 ? DECODED : DECLINED;
        }
    } else {
        result = DECLINED;
    }
    jpeg_destroy_decompress(&info);
    return result;
}

/* ------------------------------------------------------------------------------------------------- for Python */

PyDoc_STRVAR(header_doc,
"header(content, /) -> (height, width, orientation) or None\n\n"
"Height and width of a JPEG file as it lies, and how it is to be turned (EXIF's 1 to 8), from its head; None if it is\n"
"one to ask Pillow about.");

static PyObject *header(PyObject *Py_UNUSED(module), PyObject *content) {
    Py_buffer data;
    Head head;
    if (PyObject_GetBuffer(content, &data, PyBUF_SIMPLE) < 0) return NULL;
    int known = read_head(data.buf, (size_t)data.len, &head);
    PyBuffer_Release(&data);
    if (known == DECLINED) Py_RETURN_NONE;
    return Py_BuildValue("III", head.height, head.width, head.orientation);
}

PyDoc_STRVAR(read_region_doc,
"read_region(content, out, top, left, height, width, denominator=1, /) -> bool\n\n"
"Decode a rectangle into ``out``, a writable buffer of height * width * (1 or 3) bytes, rows first.\n"
"False if Pillow is to be asked. With a denominator of 2, 4 or 8 the picture is decoded that much smaller, and the\n"
"rectangle is one of the smaller picture.");

static int is_in_range(const Job *job) {
    const unsigned most = JPEG_MAX_DIMENSION, d = job->denominator;
    return job->height >= 1 && job->width >= 1 && job->height <= most && job->width <= most && job->top <= most &&
           job->left <= most && (d == 1 || d == 2 || d == 4 || d == 8);
}

/* Takes the buffers, if `out` holds so many pixels of one or three channels. */
static int set_memory(Job *job, const Py_buffer *data, const Py_buffer *out, size_t pixels) {
    if ((size_t)out->len != pixels && (size_t)out->len != 3 * pixels) return 0;
    job->channels = (size_t)out->len == pixels ? 1 : 3;
    job->data = data->buf;
    job->size = (size_t)data->len;
    job->out = out->buf;
    return 1;
}

static PyObject *out_of_range(void) {
    PyErr_SetString(PyExc_ValueError, "the rectangle, the buffer's size or the denominator is out of range");
    return NULL;
}

static PyObject *read_region(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer data, out;
    Job job = {.denominator = 1};
    int result = DECLINED;
    if (!PyArg_ParseTuple(args, "y*w*IIII|I:read_region", &data, &out, &job.top, &job.left, &job.height, &job.width,
                          &job.denominator))
        return NULL;
    int fits = is_in_range(&job) && set_memory(&job, &data, &out, (size_t)job.height * job.width);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        result = decode(&job);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return fits ? PyBool_FromLong(result) : out_of_range();
}

PyDoc_STRVAR(resize_doc,
"resize(pixels, height, width, channels, out, out_height, out_width, bicubic, /) -> bool\n\n"
"Resize uint8 [height, width, channels] into ``out``; False if memory is short.");

static PyObject *resize(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer in, out;
    unsigned height, width, channels, out_height, out_width;
    int bicubic, done = 0;
    if (!PyArg_ParseTuple(args, "y*IIIw*IIp:resize", &in, &height, &width, &channels, &out, &out_height, &out_width,
                          &bicubic))
        return NULL;
    const unsigned most = JPEG_MAX_DIMENSION;
    int fits = height >= 1 && width >= 1 && out_height >= 1 && out_width >= 1 && height <= most && width <= most &&
               out_height <= most && out_width <= most && (channels == 1 || channels == 3) &&
               (size_t)in.len == (size_t)height * width * channels &&
               (size_t)out.len == (size_t)out_height * out_width * channels;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        done = resize_pixels(out.buf, (int)out_height, (int)out_width, in.buf, (int)height, (int)width, (int)channels,
                             bicubic);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&in);
    PyBuffer_Release(&out);
    return fits ? PyBool_FromLong(done) : out_of_range();
}

PyDoc_STRVAR(read_resized_doc,
"read_resized(content, out, top, left, height, width, denominator, out_height, out_width, bicubic, flip, /) -> bool\n\n"
"Decode a rectangle as read_region does, resize it to out_height x out_width into ``out``, and mirror it if told to.");

/* Decodes into memory of its own, then resizes into `out`. */
static int decode_and_resize(Job job, int out_height, int out_width, int bicubic, int flip) {
    unsigned char *out = job.out;
    job.out = malloc((size_t)job.height * job.width * job.channels);
    int result = job.out == NULL ? DECLINED : decode(&job);
    if (result == DECODED &&
        !resize_pixels(out, out_height, out_width, job.out, (int)job.height, (int)job.width, (int)job.channels, bicubic))
        result = DECLINED;
    if (result == DECODED && flip) mirror(out, out_height, out_width, (int)job.channels);
    free(job.out);
    return result;
}

static PyObject *read_resized(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer data, out;
    Job job = {.denominator = 1};
    unsigned out_height, out_width;
    int bicubic, flip, result = DECLINED;
    if (!PyArg_ParseTuple(args, "y*w*IIIIIIIpp:read_resized", &data, &out, &job.top, &job.left, &job.height, &job.width,
                          &job.denominator, &out_height, &out_width, &bicubic, &flip))
        return NULL;
    int fits = is_in_range(&job) && out_height >= 1 && out_width >= 1 && out_height <= JPEG_MAX_DIMENSION &&
               out_width <= JPEG_MAX_DIMENSION && set_memory(&job, &data, &out, (size_t)out_height * out_width);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        result = decode_and_resize(job, (int)out_height, (int)out_width, bicubic, flip);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return fits ? PyBool_FromLong(result) : out_of_range();
}

static PyMethodDef methods[] = {
    {"header", header, METH_O, header_doc},
    {"read_region", read_region, METH_VARARGS, read_region_doc},
    {"read_resized", read_resized, METH_VARARGS, read_resized_doc},
    {"resize", resize, METH_VARARGS, resize_doc},
    {NULL, NULL, 0, NULL},
};

/* Fails where the library loaded is not the one this was compiled for. */
static int try_library(void) {
    struct jpeg_decompress_struct info;
    Errors errors;
    info.err = jpeg_std_error(&errors.base);
    errors.base.error_exit = escape;
    errors.base.output_message = stay_silent;
    if (setjmp(errors.escape) != 0) {
        PyErr_SetString(PyExc_ImportError, "the libjpeg found is not the libjpeg-turbo this was compiled for");
        return -1;
    }
    jpeg_create_decompress(&info);
    jpeg_destroy_decompress(&info);
    return 0;
}

static int execute(PyObject *module) {
    if (try_library() < 0) return -1;
    return PyModule_AddStringConstant(module, "LIBRARY", "libjpeg-turbo " TEXT(LIBJPEG_TURBO_VERSION));
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* no state outlives a call */
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "jpeg_region",
    .m_doc = "Decodes a rectangle of a JPEG file.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_jpeg_region(void) { return PyModuleDef_Init(&definition); }
