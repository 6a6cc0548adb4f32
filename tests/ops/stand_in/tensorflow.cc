// A stand-in for TensorFlow: the functions of its C API that hop_tf_ops.so calls, in a library of TensorFlow's name.
//
// It drives the operations as they are registered, where TensorFlow is not installed. Functions whose names begin with
// StandIn are for the test, which calls them by ctypes.

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "../../../ops/tensorflow/tf_c_api.h"
#include "memory.h"

using stand_in::Buffer;
using stand_in::Counted;
using stand_in::Memory;

using Dims = std::vector<int64_t>;

// The codes that the operations do not name.
constexpr TF_Code kNotFound = static_cast<TF_Code>(5), kAlreadyExists = static_cast<TF_Code>(6);

struct TF_Status : Counted {
  TF_Code code = TF_OK;
  std::string message;
};

struct TF_Tensor : Counted {
  TF_Tensor(TF_DataType type, Dims dims, std::shared_ptr<Buffer> buffer)
      : type(type), dims(std::move(dims)), buffer(std::move(buffer)) {}

  TF_DataType type;
  Dims dims;
  std::shared_ptr<Buffer> buffer;
};

struct TF_OpDefinitionBuilder {
  std::string name, text;  // The text has a line for each attribute, input and output.
  void (*infer_shapes)(TF_ShapeInferenceContext*, TF_Status*) = nullptr;
};

struct TF_ShapeHandle : Counted {
  bool has_rank = false;
  Dims dims;  // -1: unknown.
};

struct TF_ShapeInferenceContext {
  std::vector<TF_ShapeHandle> inputs;
  std::map<int, TF_ShapeHandle> outputs;
};

struct TF_KernelBuilder {
  std::string operation, device;
  void* (*create)(TF_OpKernelConstruction*);
  void (*compute)(void*, TF_OpKernelContext*);
  void (*destroy)(void*);
};

struct TF_OpKernelConstruction {
  std::map<std::string, double> attributes;
};

// Eigen::StreamInterface and Eigen::GpuDevice, as far as operations use them.
class EigenStream {
 public:
  virtual ~EigenStream() = default;
  virtual void* const& stream() const { return address; }
  void* address = nullptr;
};
struct EigenDevice {
  const EigenStream* stream;
};

// One execution of a kernel.
struct TF_OpKernelContext {
  std::unique_ptr<Memory> memory;  // First: buffers need it until they die.
  const TF_KernelBuilder* kernel;
  TF_OpKernelConstruction construction;
  std::vector<std::unique_ptr<TF_Tensor>> inputs;
  std::vector<std::shared_ptr<Buffer>> shared;  // By others that need these inputs, too.
  std::map<int, std::unique_ptr<TF_Tensor>> outputs;
  std::map<int, int> forwarded;  // The input in whose memory an output lies.
  int num_allocations = -1;      // How many succeed; below 0, all.
  TF_Status status;
  EigenStream stream;
  EigenDevice device{&stream};
};

namespace {

std::map<std::string, TF_OpDefinitionBuilder>& Operations() {
  static std::map<std::string, TF_OpDefinitionBuilder> operations;
  return operations;
}

std::map<std::pair<std::string, std::string>, TF_KernelBuilder>& Kernels() {
  static std::map<std::pair<std::string, std::string>, TF_KernelBuilder> kernels;
  return kernels;
}

size_t BytesOf(TF_DataType type) { return type == TF_FLOAT ? 4 : type == TF_UINT8 || type == TF_INT8 ? 1 : 2; }

int64_t Size(const Dims& dims) {
  return std::accumulate(dims.begin(), dims.end(), int64_t{1}, std::multiplies<int64_t>());
}

void Set(TF_Status* status, TF_Code code, const std::string& message) {
  status->code = code;
  status->message = message;
}

std::unique_ptr<TF_Tensor> NewTensor(TF_OpKernelContext* context, TF_DataType type, const Dims& dims) {
  return std::make_unique<TF_Tensor>(type, dims,
                                     std::make_shared<Buffer>(context->memory.get(), Size(dims) * BytesOf(type)));
}

// For an output or scratch memory; null where there is no more memory.
std::unique_ptr<TF_Tensor> Allocate(TF_OpKernelContext* context, TF_DataType type, const Dims& dims,
                                    TF_Status* status) {
  if (context->num_allocations-- == 0) {
    Set(status, TF_RESOURCE_EXHAUSTED, "out of memory");
    return nullptr;
  }
  Set(status, TF_OK, "");
  return NewTensor(context, type, dims);
}

template <typename Number>
void GetAttribute(const TF_OpKernelConstruction* construction, const char* name, Number* value, TF_Status* status) {
  const auto found = construction->attributes.find(name);
  if (found == construction->attributes.end()) return Set(status, kNotFound, std::string("no attribute ") + name);
  *value = static_cast<Number>(found->second);
  Set(status, TF_OK, "");
}

}  // namespace

extern "C" {

TF_Status* TF_NewStatus() { return new TF_Status; }
void TF_DeleteStatus(TF_Status* status) { delete status; }
void TF_SetStatus(TF_Status* status, TF_Code code, const char* message) { Set(status, code, message); }
TF_Code TF_GetCode(const TF_Status* status) { return status->code; }
const char* TF_Message(const TF_Status* status) { return status->message.c_str(); }

void TF_DeleteTensor(TF_Tensor* tensor) { delete tensor; }
TF_DataType TF_TensorType(const TF_Tensor* tensor) { return tensor->type; }
int TF_NumDims(const TF_Tensor* tensor) { return static_cast<int>(tensor->dims.size()); }
int64_t TF_Dim(const TF_Tensor* tensor, int index) { return tensor->dims.at(index); }
int64_t TF_TensorElementCount(const TF_Tensor* tensor) { return Size(tensor->dims); }
void* TF_TensorData(const TF_Tensor* tensor) { return tensor->buffer->data(); }

// The registration of operations.

TF_OpDefinitionBuilder* TF_NewOpDefinitionBuilder(const char* name) { return new TF_OpDefinitionBuilder{name, ""}; }
void TF_OpDefinitionBuilderAddAttr(TF_OpDefinitionBuilder* builder, const char* specification) {
  builder->text += std::string("attribute ") + specification + "\n";
}
void TF_OpDefinitionBuilderAddInput(TF_OpDefinitionBuilder* builder, const char* specification) {
  builder->text += std::string("input ") + specification + "\n";
}
void TF_OpDefinitionBuilderAddOutput(TF_OpDefinitionBuilder* builder, const char* specification) {
  builder->text += std::string("output ") + specification + "\n";
}
void TF_OpDefinitionBuilderSetShapeInferenceFunction(TF_OpDefinitionBuilder* builder,
                                                     void (*function)(TF_ShapeInferenceContext*, TF_Status*)) {
  builder->infer_shapes = function;
}
void TF_RegisterOpDefinition(TF_OpDefinitionBuilder* builder, TF_Status* status) {
  const bool is_new = Operations().emplace(builder->name, *builder).second;
  Set(status, is_new ? TF_OK : kAlreadyExists, is_new ? "" : "the operation is there already");
  delete builder;
}

TF_KernelBuilder* TF_NewKernelBuilder(const char* operation, const char* device,
                                      void* (*create)(TF_OpKernelConstruction*),
                                      void (*compute)(void*, TF_OpKernelContext*), void (*destroy)(void*)) {
  return new TF_KernelBuilder{operation, device, create, compute, destroy};
}
void TF_RegisterKernelBuilder(const char*, TF_KernelBuilder* builder, TF_Status* status) {
  const bool is_known = Operations().count(builder->operation) > 0;
  const bool is_new = Kernels().emplace(std::pair(builder->device, builder->operation), *builder).second;
  Set(status, is_known && is_new ? TF_OK : kAlreadyExists, is_known ? "the kernel is there already" : "no operation");
  delete builder;
}

// The shapes of graphs.

TF_ShapeHandle* TF_NewShapeHandle() { return new TF_ShapeHandle; }
void TF_DeleteShapeHandle(TF_ShapeHandle* shape) { delete shape; }
int64_t TF_ShapeInferenceContextNumInputs(TF_ShapeInferenceContext* context) {
  return static_cast<int64_t>(context->inputs.size());
}
void TF_ShapeInferenceContextSetUnknownShape(TF_ShapeInferenceContext* context, TF_Status* status) {
  context->outputs.clear();
  Set(status, TF_OK, "");
}
void TF_ShapeInferenceContextGetInput(TF_ShapeInferenceContext* context, int index, TF_ShapeHandle* shape,
                                      TF_Status* status) {
  *shape = context->inputs.at(index);
  Set(status, TF_OK, "");
}
void TF_ShapeInferenceContextWithRank(TF_ShapeInferenceContext*, TF_ShapeHandle* shape, int64_t rank,
                                      TF_ShapeHandle* result, TF_Status* status) {
  const int64_t received = static_cast<int64_t>(shape->dims.size());
  if (shape->has_rank && received != rank) {
    return Set(status, TF_INVALID_ARGUMENT,
               "Shape must be rank " + std::to_string(rank) + " but is rank " + std::to_string(received));
  }
  const Dims dims = shape->has_rank ? shape->dims : Dims(rank, -1);
  result->has_rank = true;
  result->dims = dims;
  Set(status, TF_OK, "");
}
void TF_ShapeInferenceContextSetOutput(TF_ShapeInferenceContext* context, int index, TF_ShapeHandle* shape,
                                       TF_Status* status) {
  context->outputs[index] = *shape;
  Set(status, TF_OK, "");
}

// Kernels.

void TF_OpKernelConstruction_GetAttrInt64(TF_OpKernelConstruction* construction, const char* name, int64_t* value,
                                          TF_Status* status) {
  GetAttribute(construction, name, value, status);
}
void TF_OpKernelConstruction_GetAttrFloat(TF_OpKernelConstruction* construction, const char* name, float* value,
                                          TF_Status* status) {
  GetAttribute(construction, name, value, status);
}
void TF_OpKernelConstruction_GetAttrBool(TF_OpKernelConstruction* construction, const char* name, TF_Bool* value,
                                         TF_Status* status) {
  GetAttribute(construction, name, value, status);
}

void TF_OpKernelContext_Failure(TF_OpKernelContext* context, TF_Status* status) { context->status = *status; }

void TF_GetInput(TF_OpKernelContext* context, int index, TF_Tensor** tensor, TF_Status* status) {
  *tensor = new TF_Tensor(*context->inputs.at(index));
  Set(status, TF_OK, "");
}

TF_Tensor* TF_AllocateOutput(TF_OpKernelContext* context, int index, TF_DataType type, const int64_t* dims,
                             int num_dims, size_t num_bytes, TF_Status* status) {
  std::unique_ptr<TF_Tensor> tensor = Allocate(context, type, Dims(dims, dims + num_dims), status);
  if (tensor == nullptr) return nullptr;
  if (tensor->buffer->num_bytes() != num_bytes) {
    Set(status, TF_INTERNAL, "the size does not fit the shape");
    return nullptr;
  }
  context->outputs[index] = std::make_unique<TF_Tensor>(*tensor);
  return tensor.release();
}

TF_Tensor* TF_AllocateTemp(TF_OpKernelContext* context, TF_DataType type, const int64_t* dims, int num_dims,
                           TF_AllocatorAttributes* attributes, TF_Status* status) {
  if (attributes->struct_size != sizeof(TF_AllocatorAttributes) || attributes->on_host) {
    Set(status, TF_INTERNAL, "memory of the operation's device is expected");
    return nullptr;
  }
  return Allocate(context, type, Dims(dims, dims + num_dims), status).release();
}

TF_Tensor* TF_ForwardInputOrAllocateOutput(TF_OpKernelContext* context, const int* inputs, int num_inputs, int output,
                                           const int64_t* dims, int num_dims, int* forwarded, TF_Status* status) {
  TF_Tensor& input = *context->inputs.at(inputs[0]);
  const Dims shape(dims, dims + num_dims);
  *forwarded = -1;
  if (num_inputs != 1 || input.buffer.use_count() > 1) {
    return TF_AllocateOutput(context, output, input.type, dims, num_dims, Size(shape) * BytesOf(input.type), status);
  }
  *forwarded = context->forwarded[output] = inputs[0];
  context->outputs[output] = std::make_unique<TF_Tensor>(input.type, shape, input.buffer);
  Set(status, TF_OK, "");
  return new TF_Tensor(*context->outputs[output]);
}

// const Eigen::GpuDevice& tensorflow::OpKernelContext::eigen_device<Eigen::GpuDevice>() const
const EigenDevice* EigenDeviceOf(const TF_OpKernelContext* context) __asm__(
    "_ZNK10tensorflow15OpKernelContext12eigen_deviceIN5Eigen9GpuDeviceEEERKT_v");
const EigenDevice* EigenDeviceOf(const TF_OpKernelContext* context) { return &context->device; }

// For the test. An address that is returned is valid until the next call of the same function.

int64_t StandInNumLive() { return stand_in::num_live; }

// Lines: "operation <name>", "attribute <specification>", "input <>", "output <>"; then "kernel <device> <operation>".
const char* StandInRegistered() {
  static std::string text;
  text.clear();
  for (const auto& [name, operation] : Operations()) text += "operation " + name + "\n" + operation.text;
  for (const auto& [key, kernel] : Kernels()) text += "kernel " + key.first + " " + key.second + "\n";
  return text.c_str();
}

TF_ShapeInferenceContext* StandInNewShapes() { return new TF_ShapeInferenceContext; }
void StandInDeleteShapes(TF_ShapeInferenceContext* context) { delete context; }

// A rank below 0: unknown.
void StandInAddShape(TF_ShapeInferenceContext* context, int rank, const int64_t* dims) {
  TF_ShapeHandle& shape = context->inputs.emplace_back();
  shape.has_rank = rank >= 0;
  if (shape.has_rank) shape.dims.assign(dims, dims + rank);
}
void StandInInferShapes(TF_ShapeInferenceContext* context, const char* operation, TF_Status* status) {
  Operations().at(operation).infer_shapes(context, status);
}
int StandInRank(TF_ShapeInferenceContext* context, int output) {
  const TF_ShapeHandle& shape = context->outputs[output];
  return shape.has_rank ? static_cast<int>(shape.dims.size()) : -1;
}
int64_t StandInDim(TF_ShapeInferenceContext* context, int output, int index) {
  return context->outputs[output].dims.at(index);
}

// Null if there is no such kernel. At most `num_allocations` succeed; below 0, all.
TF_OpKernelContext* StandInNewCall(const char* device, const char* operation, int num_allocations) {
  const auto found = Kernels().find({device, operation});
  if (found == Kernels().end()) return nullptr;
  auto* context = new TF_OpKernelContext;
  context->memory = stand_in::NewMemory(device);
  context->kernel = &found->second;
  context->num_allocations = num_allocations;
  context->stream.address = context->memory->stream();
  return context;
}
void StandInSetAttribute(TF_OpKernelContext* context, const char* name, double value) {
  context->construction.attributes[name] = value;
}
void StandInAddInput(TF_OpKernelContext* context, TF_DataType type, int rank, const int64_t* dims, const void* data,
                     int is_shared) {
  auto& tensor = context->inputs.emplace_back(NewTensor(context, type, Dims(dims, dims + rank)));
  context->memory->Write(data, tensor->buffer->num_bytes(), tensor->buffer->data());
  if (is_shared) context->shared.push_back(tensor->buffer);
}

// Creates the kernel, runs it once and destroys it, without waiting for the device.
const TF_Status* StandInCompute(TF_OpKernelContext* context) {
  void* const kernel = context->kernel->create(&context->construction);
  context->memory->Delay();
  context->kernel->compute(kernel, context);
  context->kernel->destroy(kernel);
  return &context->status;
}
int StandInNumOutputs(TF_OpKernelContext* context) { return static_cast<int>(context->outputs.size()); }
const TF_Tensor* StandInOutput(TF_OpKernelContext* context, int index) { return context->outputs.at(index).get(); }
const TF_Tensor* StandInInput(TF_OpKernelContext* context, int index) { return context->inputs.at(index).get(); }
int StandInForwarded(TF_OpKernelContext* context, int index) {
  const auto found = context->forwarded.find(index);
  return found == context->forwarded.end() ? -1 : found->second;
}
void StandInRead(TF_OpKernelContext* context, const TF_Tensor* tensor, void* data) {
  context->memory->Read(tensor->buffer->data(), tensor->buffer->num_bytes(), data);
}

// Frees everything, waits for the device, and returns what went wrong, or "".
const char* StandInEndCall(TF_OpKernelContext* context) {
  static thread_local std::string error;
  const std::unique_ptr<Memory> memory = std::move(context->memory);
  delete context;
  error = memory->Finish();
  return error.c_str();
}

}  // extern "C"
