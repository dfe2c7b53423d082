/* A driver library of two GPUs for the tests: the second has no NVLinks, no margin and no memory temperature.
 * WEATHERGLASS_STUB: "unloaded" - no driver; "none" - no GPU; "lost" - the second GPU falls off the bus at its third
 * sample. Values are fixed, except NVLink counters, which rise by 1,000 and 500 KiB at each reading. */
#include <stdlib.h>
#include <string.h>

typedef int nvmlReturn_t;
enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_LOADED = 9, LOST = 15 };
enum { FIELD_MEMORY_TEMP = 82, FIELD_NVLINK_TX = 138, FIELD_NVLINK_RX = 139 };
typedef struct { unsigned fieldId, scopeId; long long timestamp, latencyUsec; int valueType; nvmlReturn_t nvmlReturn;
                 union { double dVal; int siVal; unsigned uiVal; unsigned long ulVal; unsigned long long ullVal; } value; } field_t;

static int number[2] = {0, 1};
static int samples[2];
static unsigned long long links[2];

static int is(const char *word) { const char *told = getenv("WEATHERGLASS_STUB"); return told && !strcmp(told, word); }
static int second(void *board) { return *(int *)board; }

nvmlReturn_t nvmlInit_v2(void) { return is("unloaded") ? NOT_LOADED : SUCCESS; }
nvmlReturn_t nvmlInitWithFlags(unsigned flags) { (void)flags; return nvmlInit_v2(); }
nvmlReturn_t nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(nvmlReturn_t code) { return code == NOT_LOADED ? "Driver Not Loaded" : "Some Error"; }
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) { *count = is("none") ? 0 : 2; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, void **board) { *board = &number[index]; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetUUID(void *board, char *uuid, unsigned size) {
  (void)size; strcpy(uuid, second(board) ? "GPU-two" : "GPU-one"); return SUCCESS; }
nvmlReturn_t nvmlDeviceGetName(void *board, char *name, unsigned size) {
  (void)size; strcpy(name, second(board) ? "NVIDIA Small" : "NVIDIA Large"); return SUCCESS; }
nvmlReturn_t nvmlDeviceGetUtilizationRates(void *board, unsigned *told) {
  if (second(board) && is("lost") && ++samples[1] > 2) return LOST;
  told[0] = second(board) ? 0 : 97; told[1] = 40; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(void *board, void *told) {
  unsigned long long *bytes = (unsigned long long *)((char *)told + 8);
  (void)board; bytes[0] = 80ull << 30; bytes[1] = 1ull << 30; bytes[2] = 9ull << 30; bytes[3] = 70ull << 30; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetPowerUsage(void *board, unsigned *mw) { *mw = second(board) ? 60000 : 651500; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(void *board, unsigned *mw) { (void)board; *mw = 700000; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetTemperature(void *board, int sensor, unsigned *c) { (void)sensor; *c = second(board) ? 31 : 74; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetMarginTemperature(void *board, void *told) {
  if (second(board)) return NOT_SUPPORTED;
  ((int *)told)[1] = 13; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetClockInfo(void *board, int kind, unsigned *mhz) { (void)board; *mhz = kind == 1 ? 1980 : 2619; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(void *board, unsigned long long *bits) {
  *bits = second(board) ? 0x1 : 0x4 | 0x40; return SUCCESS; } /* idle; power cap and hardware heat */
nvmlReturn_t nvmlDeviceGetTotalEccErrors(void *board, int kind, int counter, unsigned long long *count) {
  (void)counter; *count = second(board) || kind != 1 ? 0 : 5; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetRemappedRows(void *board, unsigned *corrected, unsigned *wrong, unsigned *pending, unsigned *failed) {
  (void)board; *corrected = 2; *wrong = 1; *pending = *failed = 0; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetFieldValues(void *board, int count, field_t *fields) {
  for (int k = 0; k < count; k++) {
    fields[k].nvmlReturn = second(board) ? NOT_SUPPORTED : SUCCESS;
    if (fields[k].fieldId == FIELD_MEMORY_TEMP) { fields[k].valueType = 1; fields[k].value.uiVal = 83; continue; }
    int sent = fields[k].fieldId == FIELD_NVLINK_TX;
    if (!sent && fields[k].fieldId != FIELD_NVLINK_RX) { fields[k].nvmlReturn = NOT_SUPPORTED; continue; }
    links[!sent] += sent ? 1000 : 500;
    fields[k].valueType = 3; fields[k].value.ullVal = links[!sent];
  }
  return SUCCESS;
}
