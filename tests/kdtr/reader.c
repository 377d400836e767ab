/* Reads a KDTR file, version 1, with nothing but the C library. `reader FILE` checks it and prints one line an array:
   name dtype shape nbytes crc32 ok. Written from docs/KDTR.md; skips meta, and does not look for duplicate keys. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char name[256], dtype[16], shape[700]; uint64_t elements, offset, nbytes, crc32; } Array;
static const char *dtypes[] = {"bool", "u8", "i8", "f8_e4m3", "u16", "i16", "f16", "bf16",
                               "u32", "i32", "f32", "u64", "i64", "f64"};
static const uint64_t itemsizes[] = {1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 8, 8, 8};
static const char name_chars[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-";
static const char *cursor, *header_end;

static void check(int is_right, const char *wanted, const char *where) {
    if (!is_right) exit((fprintf(stderr, "not a KDTR file: wanted %s %s\n", wanted, where), 1));
}
static uint32_t crc32_of(uint32_t crc, const unsigned char *bytes, size_t count) {
    for (crc = ~crc; count--; )
        for (int bit = (crc ^= *bytes++, 0); bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    return ~crc;
}
static uint64_t little_endian(const unsigned char *bytes, int count) {
    uint64_t value = 0;
    while (count--) value = value << 8 | bytes[count];
    return value;
}
static int peek(void) { /* the next character that is not white space, 0 at the end */
    while (cursor < header_end && *cursor && strchr(" \t\r\n", *cursor)) cursor++;
    return cursor < header_end ? *cursor : 0;
}
static int take(char wanted) { return peek() == wanted ? (cursor++, 1) : 0; }
static void string(char *text, size_t size) { /* into text[size]; with text NULL, any string, skipped */
    check(take('"'), "a string", "in the header");
    for (; cursor < header_end && *cursor != '"'; cursor++) {
        check((unsigned char)*cursor >= 32, "no control character", "in a string");
        if (*cursor == '\\') check(!text && ++cursor < header_end, "no escape", "in a name");
        if (text) check(--size > 0, "a shorter name", "(this reader's own limit)"), *text++ = *cursor;
    }
    if (text) *text = 0;
    check(take('"'), "an end", "of a string");
}
static void key(char *text, size_t size) { string(text, size), check(take(':'), "a colon", "after a key"); }
static uint64_t natural(void) {
    uint64_t value = 0, digit;
    const char *first = (peek(), cursor);
    for (; cursor < header_end && (digit = (uint64_t)*cursor - '0') <= 9; cursor++, value = value * 10 + digit)
        check(value <= (INT64_MAX - digit) / 10, "a number", "below 2^63");
    check(cursor > first && (*first != '0' || cursor == first + 1), "a plain integer", "in the header");
    return value;
}
static void skip_value(int level) { /* a value of meta; numbers, true, false and null are taken loosely */
    int open = peek(), close = open == '{' ? '}' : ']', is_first = 1;
    const char *first = cursor;
    if (open == '"') { string(NULL, 0); return; }
    while (cursor < header_end && *cursor && strchr("+-.0123456789Eaeflnrstu", *cursor)) cursor++;
    if (cursor > first) return;
    check(open == '{' || open == '[', "a value", "in meta");
    check(level <= 16, "at most 16 levels", "in meta");
    for (cursor++; !take((char)close); is_first = 0) {
        check(is_first || take(','), "a comma", "in meta");
        if (open == '{') key(NULL, 0);
        skip_value(level + 1);
    }
}
static void shape(Array *array) { /* elements is the product without its zeros, which hide no overflow */
    char *text = array->shape;
    int rank = 0;
    check(take('['), "a list as shape of", array->name);
    for (array->elements = 1, *text = 0; !take(']'); rank++) {
        check(rank < 32 && (!rank || take(',')), "at most 32 dimensions in", array->name);
        uint64_t size = natural(), factor = size ? size : 1;
        text += sprintf(text, rank ? ",%llu" : "%llu", (unsigned long long)size);
        check(array->elements <= INT64_MAX / factor, "fewer than 2^63 bytes in", array->name);
        array->elements *= factor;
    }
}
static void entry(Array *array) { /* one key and value of arrays; seen has a bit for each of the five keys inside */
    char word[16];
    int seen = 0, kind = 0;
    key(array->name, sizeof array->name);
    check(*array->name && !array->name[strspn(array->name, name_chars)], "another name than", array->name);
    for (int num_keys = 0; num_keys < 5; num_keys++) {
        check(take(num_keys ? ',' : '{'), "an object of five keys for", array->name);
        key(word, sizeof word);
        if (!strcmp(word, "dtype")) seen |= 1, string(array->dtype, sizeof array->dtype);
        if (!strcmp(word, "shape")) seen |= 2, shape(array);
        if (!strcmp(word, "offset")) seen |= 4, array->offset = natural();
        if (!strcmp(word, "nbytes")) seen |= 8, array->nbytes = natural();
        if (!strcmp(word, "crc32")) seen |= 16, array->crc32 = natural();
    }
    check(take('}') && seen == 31, "dtype shape offset nbytes crc32 for", array->name);
    while (kind < 14 && strcmp(array->dtype, dtypes[kind])) kind++;
    check(kind < 14 && array->elements <= INT64_MAX / itemsizes[kind], "dtype and shape of sense for", array->name);
    if (array->shape[0] == '0' || strstr(array->shape, ",0")) array->elements = 0;
    check(array->nbytes == array->elements * itemsizes[kind], "another nbytes for", array->name);
}

/* Reads one array, which starts on the first boundary after `end`; returns its end. All counted in bytes of data. */
static uint64_t array(FILE *file, uint64_t end, uint64_t data_bytes) {
    static unsigned char block[1 << 16];
    static Array a;
    entry(&a);
    uint64_t left = a.nbytes, start = (end + 63) / 64 * 64;
    uint32_t crc = 0;
    check(a.offset == start, "as offset the first boundary after the last array for", a.name);
    check(start <= data_bytes && left <= data_bytes - start, "a file that holds all of", a.name);
    for (; end < start; end++) check(getc(file) == 0, "zeros before", a.name);
    for (size_t count; left; left -= count, crc = crc32_of(crc, block, count)) {
        count = fread(block, 1, left < sizeof block ? (size_t)left : sizeof block, file);
        check(count > 0, "to read", a.name);
        for (size_t i = 0; i < count && !strcmp(a.dtype, "bool"); i++) check(block[i] < 2, "0 or 1 in", a.name);
    }
    check(crc == a.crc32, "bytes that have the crc32 of", a.name);
    printf("%s %s [%s] %llu %08lx ok\n", a.name, a.dtype, a.shape, (unsigned long long)a.nbytes, (unsigned long)crc);
    return start + a.nbytes;
}

int main(int argc, char **argv) {
    unsigned char prefix[24];
    FILE *file = argc == 2 ? fopen(argv[1], "rb") : NULL;
    check(file && !fseek(file, 0, SEEK_END), "a file that opens:", argc == 2 ? argv[1] : "");
    uint64_t size = (uint64_t)ftell(file), end = 0;
    rewind(file);
    check(fread(prefix, 1, 24, file) == 24 && !memcmp(prefix, "KDTR\1\0\0", 8), "magic and version", "");
    check(!little_endian(prefix + 20, 4), "a zero", "as reserved word");
    uint64_t length = little_endian(prefix + 8, 8);
    check(length <= 64 << 20 && (24 + length) % 64 == 0 && 24 + length <= size, "a header", "inside the file");
    char word[16], last = 0, *header = malloc(length);
    check(header && fread(header, 1, length, file) == length && *header == '{', "to read", "a header");
    check(crc32_of(0, (unsigned char *)header, length) == little_endian(prefix + 16, 4), "the crc32", "of the header");
    cursor = header, header_end = header + length;
    for (int num_keys = 0; num_keys < 2; num_keys++) {
        check(take(num_keys ? ',' : '{'), "an object of two keys", "as header");
        key(word, sizeof word);
        check(peek() == '{' && !strcmp(word, *word == 'm' ? "meta" : "arrays") && *word != last, "meta, arrays", word);
        last = *word;
        if (last == 'm') skip_value(2);
        else for (int num_arrays = (cursor++, 0); !take('}'); num_arrays++) {
            check(!num_arrays || take(','), "a comma after", "an array");
            end = array(file, end, size - 24 - length);
        }
    }
    for (check(take('}'), "an end", "of the header"); cursor < header_end; cursor++)
        check(*cursor == ' ', "spaces", "after the header");
    check(getc(file) == EOF, "nothing", "after the last array");
    free(header);
    return fclose(file);
}
