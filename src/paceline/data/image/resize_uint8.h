/* Antialiased resizing of uint8 pixels [H, W, C], first across, then down, each rounded to uint8: the arithmetic of
 * torch's interpolate(antialias=True) on bytes, whose bits it gives (paceline.data.image.jpeg compares them before use).
 *
 * Plain loops. For large images torch's own, written for vector units, are faster; for small ones calling them takes
 * longer than the work.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int taps;      /* most weights of one output pixel */
    int precision; /* bits behind the point of a weight */
    int *first;    /* for each output pixel, its first input pixel */
    int *count;    /* and how many there are */
    int *weights;  /* [output pixels, taps] */
} Filter;

static double triangle(double x) {
    x = fabs(x);
    return x < 1 ? 1 - x : 0;
}

/* Keys' cubic with a = -0.5. */
static double cubic(double x) {
    const double a = -0.5;
    x = fabs(x);
    if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
    if (x < 2) return (((x - 5) * x + 8) * x - 4) * a;
    return 0;
}

static void free_filter(Filter *filter) {
    free(filter->first);
    filter->first = NULL;
}

/* One allocation holds all: it begins at `first`. */
static int make_filter(Filter *filter, int in, int out, int bicubic) {
    double scale = (double)in / out, support = (bicubic ? 2.0 : 1.0) * (scale >= 1 ? scale : 1);
    double shrink = scale >= 1 ? 1 / scale : 1, largest = 0;
    int taps = (int)ceil(support) * 2 + 1;
    size_t cells = (size_t)out * (size_t)taps;
    double *exact = malloc(cells * sizeof *exact);
    int *memory = malloc((2 * (size_t)out + cells) * sizeof *memory);
    if (exact == NULL || memory == NULL) {
        free(exact);
        free(memory);
        return 0;
    }
    *filter = (Filter){taps, 0, memory, memory + out, memory + 2 * (size_t)out};
    for (int i = 0; i < out; i++) {
        double center = scale * (i + 0.5), total = 0, *row = exact + (size_t)i * (size_t)taps;
        long first = (long)(center - support + 0.5), end = (long)(center + support + 0.5);
        if (first < 0) first = 0;
        if (end > in) end = in;
        int count = (int)(end - first) < taps ? (int)(end - first) : taps;
        for (int j = 0; j < count; j++) {
            double x = (j + first - center + 0.5) * shrink;
            row[j] = bicubic ? cubic(x) : triangle(x);
            total += row[j];
        }
        for (int j = 0; j < count; j++) {
            if (total != 0) row[j] /= total;
            if (row[j] > largest) largest = row[j];
        }
        filter->first[i] = (int)first;
        filter->count[i] = count;
    }
    while (filter->precision < 22 && (int)(0.5 + largest * (1 << (filter->precision + 1))) < 1 << 15) filter->precision++;
    for (int i = 0; i < out; i++)
        for (int j = 0; j < filter->count[i]; j++) {
            double weight = exact[(size_t)i * (size_t)taps + (size_t)j] * (1 << filter->precision);
            filter->weights[(size_t)i * (size_t)taps + (size_t)j] = (int)(weight < 0 ? weight - 0.5 : weight + 0.5);
        }
    free(exact);
    return 1;
}

static unsigned char to_byte(int sum, int precision) {
    sum >>= precision;
    return (unsigned char)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
}

static void resize_grey_across(unsigned char *out, const unsigned char *in, int rows, int in_width, int out_width,
                               const Filter *filter) {
    const int half = 1 << (filter->precision - 1);
    for (int y = 0; y < rows; y++, in += in_width)
        for (int x = 0; x < out_width; x++) {
            const int *weights = filter->weights + (size_t)x * (size_t)filter->taps;
            const unsigned char *from = in + filter->first[x];
            int sum = half;
            for (int j = 0; j < filter->count[x]; j++) sum += weights[j] * from[j];
            *out++ = to_byte(sum, filter->precision);
        }
}

static void resize_colour_across(unsigned char *out, const unsigned char *in, int rows, int in_width, int out_width,
                                 const Filter *filter) {
    const int half = 1 << (filter->precision - 1), precision = filter->precision;
    for (int y = 0; y < rows; y++, in += 3 * (size_t)in_width)
        for (int x = 0; x < out_width; x++, out += 3) {
            const int *weights = filter->weights + (size_t)x * (size_t)filter->taps;
            const unsigned char *from = in + 3 * (size_t)filter->first[x];
            int red = half, green = half, blue = half, count = filter->count[x];
            for (int j = 0; j < count; j++, from += 3) {
                red += weights[j] * from[0];
                green += weights[j] * from[1];
                blue += weights[j] * from[2];
            }
            out[0] = to_byte(red, precision);
            out[1] = to_byte(green, precision);
            out[2] = to_byte(blue, precision);
        }
}

enum { CHUNK = 64 };

/* In chunks of a fixed length, so that compilers use vector units. */
static void resize_down(unsigned char *out, const unsigned char *in, int row_bytes, int out_height, const Filter *filter) {
    const int half = 1 << (filter->precision - 1);
    for (int y = 0; y < out_height; y++, out += row_bytes) {
        const int *weights = filter->weights + (size_t)y * (size_t)filter->taps;
        const unsigned char *from = in + (size_t)filter->first[y] * (size_t)row_bytes;
        for (int begin = 0; begin < row_bytes; begin += CHUNK) {
            int sums[CHUNK], length = row_bytes - begin < CHUNK ? row_bytes - begin : CHUNK;
            for (int k = 0; k < CHUNK; k++) sums[k] = half;
            for (int j = 0; j < filter->count[y]; j++) {
                const unsigned char *row = from + (size_t)j * (size_t)row_bytes + (size_t)begin;
                const int weight = weights[j];
                if (length == CHUNK)
                    for (int k = 0; k < CHUNK; k++) sums[k] += weight * row[k];
                else
                    for (int k = 0; k < length; k++) sums[k] += weight * row[k];
            }
            for (int k = 0; k < length; k++) out[begin + k] = to_byte(sums[k], filter->precision);
        }
    }
}

/* Mirrors rows in place. */
static void mirror(unsigned char *pixels, int height, int width, int channels) {
    for (int y = 0; y < height; y++, pixels += (size_t)width * (size_t)channels)
        for (int left = 0, right = width - 1; left < right; left++, right--)
            for (int c = 0; c < channels; c++) {
                unsigned char kept = pixels[left * channels + c];
                pixels[left * channels + c] = pixels[right * channels + c];
                pixels[right * channels + c] = kept;
            }
}

/* Resizes in -> out; 0 if memory is short. Sides that stay as they are are not touched. */
static int resize_pixels(unsigned char *out, int out_height, int out_width, const unsigned char *in, int height,
                         int width, int channels, int bicubic) {
    Filter across = {0}, down = {0};
    unsigned char *middle = NULL;
    const unsigned char *narrowed = in;
    int done = 0, row_bytes = out_width * channels;
    if (height == out_height && width == out_width) {
        memcpy(out, in, (size_t)height * (size_t)row_bytes);
        return 1;
    }
    if (width != out_width) {
        if (height != out_height) middle = malloc((size_t)height * (size_t)row_bytes);
        unsigned char *to = height != out_height ? middle : out;
        if (to == NULL || !make_filter(&across, width, out_width, bicubic)) goto finish;
        if (channels == 1) resize_grey_across(to, in, height, width, out_width, &across);
        else resize_colour_across(to, in, height, width, out_width, &across);
        narrowed = to;
    }
    if (height != out_height) {
        if (!make_filter(&down, height, out_height, bicubic)) goto finish;
        resize_down(out, narrowed, row_bytes, out_height, &down);
    }
    done = 1;
finish:
    free_filter(&across);
    free_filter(&down);
    free(middle);
    return done;
}
