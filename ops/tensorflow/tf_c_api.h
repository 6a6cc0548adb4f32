// The few functions of TensorFlow's C API that the operations are made of, from its headers kernels.h, ops.h,
// tf_status.h and tf_tensor.h.
//
// They are stable across minor versions, while the C++ classes behind them are not: one library runs in all supported
// versions, and TensorFlow need not be there when it is built.

#ifndef HOP_TF_OPS_TENSORFLOW_TF_C_API_H_
#define HOP_TF_OPS_TENSORFLOW_TF_C_API_H_

#include <stddef.h>
#include <stdint.h>

extern "C" {

typedef enum { TF_FLOAT = 1, TF_UINT8 = 4, TF_INT8 = 6, TF_BFLOAT16 = 14, TF_HALF = 19 } TF_DataType;
typedef enum { TF_OK = 0, TF_INVALID_ARGUMENT = 3, TF_RESOURCE_EXHAUSTED = 8, TF_INTERNAL = 13 } TF_Code;
typedef unsigned char TF_Bool;

typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
typedef struct TF_ShapeHandle TF_ShapeHandle;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;
typedef struct {
  size_t struct_size;
  TF_Bool on_host;
} TF_AllocatorAttributes;

TF_Status* TF_NewStatus(void);
void TF_DeleteStatus(TF_Status*);
void TF_SetStatus(TF_Status*, TF_Code, const char* message);
TF_Code TF_GetCode(const TF_Status*);
const char* TF_Message(const TF_Status*);

void TF_DeleteTensor(TF_Tensor*);
TF_DataType TF_TensorType(const TF_Tensor*);
int TF_NumDims(const TF_Tensor*);
int64_t TF_Dim(const TF_Tensor*, int index);
int64_t TF_TensorElementCount(const TF_Tensor*);
void* TF_TensorData(const TF_Tensor*);

TF_OpDefinitionBuilder* TF_NewOpDefinitionBuilder(const char* name);
void TF_OpDefinitionBuilderAddAttr(TF_OpDefinitionBuilder*, const char* specification);
void TF_OpDefinitionBuilderAddInput(TF_OpDefinitionBuilder*, const char* specification);
void TF_OpDefinitionBuilderAddOutput(TF_OpDefinitionBuilder*, const char* specification);
void TF_OpDefinitionBuilderSetShapeInferenceFunction(TF_OpDefinitionBuilder*,
                                                     void (*function)(TF_ShapeInferenceContext*, TF_Status*));
void TF_RegisterOpDefinition(TF_OpDefinitionBuilder*, TF_Status*);

TF_ShapeHandle* TF_NewShapeHandle(void);
void TF_DeleteShapeHandle(TF_ShapeHandle*);
int64_t TF_ShapeInferenceContextNumInputs(TF_ShapeInferenceContext*);
void TF_ShapeInferenceContextSetUnknownShape(TF_ShapeInferenceContext*, TF_Status*);
void TF_ShapeInferenceContextGetInput(TF_ShapeInferenceContext*, int index, TF_ShapeHandle*, TF_Status*);
void TF_ShapeInferenceContextWithRank(TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t rank, TF_ShapeHandle* result,
                                      TF_Status*);
void TF_ShapeInferenceContextSetOutput(TF_ShapeInferenceContext*, int index, TF_ShapeHandle*, TF_Status*);

TF_KernelBuilder* TF_NewKernelBuilder(const char* operation, const char* device,
                                      void* (*create)(TF_OpKernelConstruction*),
                                      void (*compute)(void*, TF_OpKernelContext*), void (*destroy)(void*));
void TF_RegisterKernelBuilder(const char* name, TF_KernelBuilder*, TF_Status*);
void TF_OpKernelConstruction_GetAttrInt64(TF_OpKernelConstruction*, const char* name, int64_t* value, TF_Status*);
void TF_OpKernelConstruction_GetAttrFloat(TF_OpKernelConstruction*, const char* name, float* value, TF_Status*);
void TF_OpKernelConstruction_GetAttrBool(TF_OpKernelConstruction*, const char* name, TF_Bool* value, TF_Status*);
void TF_OpKernelConstruction_Failure(TF_OpKernelConstruction*, TF_Status*);
void TF_OpKernelContext_Failure(TF_OpKernelContext*, TF_Status*);
void TF_GetInput(TF_OpKernelContext*, int index, TF_Tensor**, TF_Status*);
TF_Tensor* TF_AllocateOutput(TF_OpKernelContext*, int index, TF_DataType, const int64_t* dims, int num_dims,
                             size_t num_bytes, TF_Status*);
TF_Tensor* TF_AllocateTemp(TF_OpKernelContext*, TF_DataType, const int64_t* dims, int num_dims, TF_AllocatorAttributes*,
                           TF_Status*);
TF_Tensor* TF_ForwardInputOrAllocateOutput(TF_OpKernelContext*, const int* inputs, int num_inputs, int output,
                                           const int64_t* dims, int num_dims, int* forwarded, TF_Status*);

}  // extern "C"

#endif  // HOP_TF_OPS_TENSORFLOW_TF_C_API_H_
