#include <string>

#include "hop_tf_kernels.h"
#include "parallel.h"
#include "tiles.h"

using namespace hop_tf;

#if defined(__clang__)
#define HOP_TF_COMPILER ""
#else
#define HOP_TF_COMPILER "g++ "
#endif

int HopTfNumCores() { return NumCores(); }

const char* HopTfBuildInfo() {
  static const std::string info = std::string(HOP_TF_COMPILER __VERSION__ ", ") + InstructionSet();
  return info.c_str();
}
